"""Jobs are spread over machines: each gets what it can do, and the job of a lost machine goes to another."""

import threading

import pytest

from speculative.bench.cluster.ray_nodes import NodeLost, WorkQueue, distribute


def anything(job, machine):
    return True


def test_each_job_is_done_once_by_a_suitable_machine():
    done = []
    left = distribute(
        list(range(20)),
        ["even", "odd"],
        lambda job, machine: machine == ("odd" if job % 2 else "even"),
        lambda job, _: -job,
        lambda *one: done.append(one),
    )
    assert left == [] and sorted(done) == [(i, "odd" if i % 2 else "even", -i) for i in range(20)]


def test_job_of_a_lost_machine_goes_to_another():
    machines, done, lost = ["first", "second"], [], threading.Event()

    def work(job, machine):
        if machine == "first":
            lost.set()
            raise NodeLost("the first was lost")
        assert lost.wait(60)

    left = distribute(["a", "b"], machines, anything, work, lambda job, machine, _: done.append((job, machine)))
    assert left == [] and machines == ["second"] and sorted(done) == [("a", "second"), ("b", "second")]


def test_idle_machine_waits_for_a_job_that_may_return():
    queue, found = WorkQueue(["a"], anything, print), []
    assert queue.take("first") == "a"
    other = threading.Thread(target=lambda: found.append(queue.take("second")))
    other.start()
    other.join(0.2)
    assert other.is_alive() and not found
    queue.lose("a", "first", "the first was lost")
    other.join(60)
    assert found == ["a"]


def test_jobs_without_a_machine_are_returned_with_the_reason():
    machines = ["only"]

    def work(job, machine):
        raise NodeLost("it was lost")

    assert distribute(["a", "b"], machines, anything, work, print) == [("a", "it was lost"), ("b", "")]
    assert machines == []


def test_error_ends_all_work_and_is_raised():
    done = []
    with pytest.raises(ZeroDivisionError):
        distribute([0, 1], ["only"], anything, lambda job, _: 1 // job, lambda job, *_: done.append(job))
    assert not done
