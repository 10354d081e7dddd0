"""Scripts that check a page in a browser: contrast, and elements that extend beyond the window."""

# The contrast of every text, and of every line and mark of a chart, against its background (WCAG 2.2, 1.4.3, 1.4.11).
CONTRAST = """() => {
    const parse = colour => { const n = colour.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
    const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const light = colour => colour.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = node => parse(getComputedStyle(node).backgroundColor);
    const behind = node => node ? over(ground(node), behind(node.parentElement)) : [255, 255, 255, 1];
    const contrast = (node, colour) => {
        const below = behind(node), [a, b] = [light(over(parse(colour), below)), light(below)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    const texts = [], marks = [];
    for (const node of document.body.querySelectorAll('*')) {
        if (node.closest('title, desc, .patterns') || !node.getClientRects().length) continue;
        const style = getComputedStyle(node);
        if ([...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()))
            texts.push([contrast(node, node.closest('svg') ? style.fill : style.color), node.textContent.slice(0, 40)]);
        if (node.matches('.line, .marker')) marks.push([contrast(node, style.stroke), node.getAttribute('class')]);
    }
    return {texts, marks};
}"""

# Elements that extend beyond the window, except those in parts that scroll sideways.
BEYOND = """() => [...document.body.querySelectorAll('*')]
    .filter(node => !node.parentElement.closest('.scroll'))
    .filter(node => node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map(node => node.outerHTML.slice(0, 80))"""
