"""The README.md of a model repository: how to start the server, example requests, limitations."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from speculative.convert.optimum_cli import shown

SERVER = "2026.4.1"  # the latest release; this was written from sources of about that time
UNTESTED = f"This project never ran the server itself: this folder is untested with OpenVINO Model Server {SERVER}."
GREEDY_ONLY = (
    "Send only greedy requests (temperature 0, the default set here) as long as scripts/verify_lossless.py reports "
    "the server's engine as wrong: with a draft model, its sampled text does not have the main model's distribution."
)
EAGLE3_NOTE = (
    "With an EAGLE-3 draft the server takes one request at a time (max_num_seqs is 1). A request may draft a tree: "
    "branching_factor and tree_depth, with num_assistant_tokens of at least tree_depth."
)


@dataclass
class Guide:
    """The values in the text. `drafting` holds the request fields that set the draft length; empty: no draft."""

    name: str
    folder: Path  # absolute
    devices: list[str]
    address: str
    port: int
    image: str
    drafting: dict[str, object]
    chat: bool  # whether the model has a chat template
    notes: list[str]

    def bare_metal(self) -> str:
        config = shown([str(self.folder / "config.json")])
        return f"ovms --config_path {config} --rest_port {self.port} --rest_bind_address {self.address}"

    def docker(self) -> str:
        """The docker command; it publishes the port on `address` only, so the server cannot be reached elsewhere."""
        words = ["docker run --rm", '--user "$(id -u):$(id -g)"']
        for kind, path in (("GPU", "/dev/dri"), ("NPU", "/dev/accel")):
            if any(kind in device for device in self.devices):
                words.append(f"--device {path}")
        if "--device /dev/dri" in words or "--device /dev/accel" in words:
            words.append('--group-add "$(stat -c %g /dev/dri/render* | head -n 1)"')
        words += [
            f"-p {self.address}:{self.port}:{self.port}",
            f"-v {shown([f'{self.folder}:/models:ro'])}",
            self.image,
            f"--config_path /models/config.json --rest_port {self.port}",
        ]
        return " ".join(words)

    def request(self) -> dict:
        """Body of an example request."""
        prompt: dict[str, object] = {"messages": [{"role": "user", "content": "Write a function that reads a file."}]}
        if not self.chat:
            prompt = {"prompt": "def read_file(path):"}
        return {"model": self.name, **prompt, "max_tokens": 100, "temperature": 0, **self.drafting}

    def url(self) -> str:
        host = "127.0.0.1" if self.address == "0.0.0.0" else self.address
        return f"http://{host}:{self.port}"

    def curl(self) -> str:
        endpoint = "chat/completions" if self.chat else "completions"
        body = shlex.quote(json.dumps(self.request(), ensure_ascii=False))
        return f"curl {self.url()}/v3/{endpoint} -H 'Content-Type: application/json' -d {body}"

    def python(self) -> str:
        request = self.request()
        known = {key: value for key, value in request.items() if key not in self.drafting}
        arguments = [f"    {key}={value!r}," for key, value in known.items()]
        if self.drafting:
            arguments.append(f"    extra_body={self.drafting!r},")
        create = "chat.completions.create" if self.chat else "completions.create"
        text = "part.choices[0].delta.content" if self.chat else "part.choices[0].text"
        return "\n".join(
            [
                "from openai import OpenAI",
                "",
                f'client = OpenAI(base_url="{self.url()}/v3", api_key="unused")',
                f"for part in client.{create}(",
                *arguments,
                "    stream=True,",
                "):",
                f'    print({text} or "", end="", flush=True)',
            ]
        )

    def text(self) -> str:
        """The content of README.md."""
        title = "speculative decoding" if self.drafting else "the main model alone"
        return f"""\
# {self.name}: a model repository for OpenVINO Model Server ({title})

{UNTESTED} Its files match the published schema.

{"".join(f"- {note}" + chr(10) for note in self.notes)}
## Start

With Docker:

```bash
{self.docker()}
```

On bare metal, with the server's package installed:

```bash
{self.bare_metal()}
```

It is ready when `curl {self.url()}/v1/config` reports `AVAILABLE`.

## Send requests

```bash
{self.curl()}
```

With the openai package:

```python
{self.python()}
```
"""
