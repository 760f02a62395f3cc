"""The curves over caps as SVG: tokens per second, and bytes read per token, for each number of bits."""

import math

from report import belady

WIDTH, HEIGHT, LEFT, TOP, ROW = 420, 240, 70, 68, 330
"""Of one panel, where the first begins, and from one row of panels to the next."""
GAP = 110
COLOURS = {"moec": "#c2410c", "moec big-little": "#7c3aed", "llama.cpp": "#1d4ed8", "llama.cpp, repacked": "#60a5fa"}
DASHED = {"uniform": ("#9ca3af", "needed, every expert as likely"), "popular": ("#4b5563", "needed, the popular ones kept")}
FUTURE = "#059669"


def nice(least, most):
    """1, 2 and 5 times powers of ten from below the least value to above the most."""
    steps = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)]
    low = max((s for s in steps if s <= least), default=steps[0])
    high = min((s for s in steps if s >= most), default=steps[-1])
    return [s for s in steps if low <= s <= high]


class Panel:
    """Axes: caps in GiB, no cap at the right end; a logarithmic scale upwards."""

    def __init__(self, x, y, title, unit, caps, values):
        self.x, self.y, self.caps = x, y, caps
        self.ticks = nice(min(values), max(values)) if values else [1, 10]
        if len(self.ticks) < 2:
            self.ticks.append(self.ticks[0] * 2)
        self.out = [
            f'<text x="{x}" y="{y - 14}" class="title">{title}</text>',
            f'<text x="{x + WIDTH}" y="{y - 14}" class="unit" text-anchor="end">{unit}</text>',
        ]
        for tick in self.ticks:
            at = self.up(tick)
            self.out.append(f'<line x1="{x}" y1="{at:.1f}" x2="{x + WIDTH}" y2="{at:.1f}" class="grid"/>')
            self.out.append(f'<text x="{x - 8}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for cap in caps:
            name = "no cap" if cap is None else f"{cap / 2**30:g}"
            self.out.append(f'<text x="{self.across(cap):.1f}" y="{y + HEIGHT + 18}" text-anchor="middle">{name}</text>')
        self.out.append(f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT + 36}" text-anchor="middle">memory cap, GiB</text>')

    def across(self, cap):
        known = [c for c in self.caps if c is not None]
        if cap is None:
            return self.x + WIDTH - 20
        low, high = min(known), max(known)
        room = WIDTH - 40 - (70 if None in self.caps else 0)
        return self.x + 20 + (room * (cap - low) / (high - low) if high > low else room / 2)

    def up(self, value):
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return self.y + HEIGHT - HEIGHT * (math.log(max(value, self.ticks[0])) - low) / (high - low)

    def curve(self, points, colour, name, dashed=False):
        """Points of a curve by cap; hovering over one gives its value."""
        points = [(cap, value) for cap, value in points if value and value >= self.ticks[0]]
        path = " ".join(f"{self.across(cap):.1f},{self.up(value):.1f}" for cap, value in points)
        style = ' stroke-dasharray="5 4"' if dashed else ""
        if len({cap for cap, _ in points}) > 1:
            self.out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>')
        for cap, value in points if not dashed else []:
            self.out.append(f'<circle cx="{self.across(cap):.1f}" cy="{self.up(value):.1f}" r="3.5" fill="{colour}">'
                            f'<title>{name}: {value:.3g}</title></circle>')


def legend(names, y, width):
    """A line and a name for each curve, in as many rows as it takes."""
    out, x = [], LEFT
    for name, colour, dashed in names:
        wide = 60 + 7 * len(name)
        if x > LEFT and x + wide > width:
            x, y = LEFT, y + 20
        style = ' stroke-dasharray="5 4"' if dashed else ""
        out.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{colour}" stroke-width="2.5"{style}/>')
        out.append(f'<text x="{x + 32}" y="{y + 4}">{name}</text>')
        x += wide
    return out


def late(row):
    """What was measured of warm tokens; of those before, where a run was cut before there were any."""
    return row["warm"] if row["warm"]["rate"] else row["cold"]


def svg(results):
    """All panels: a row for each number of bits."""
    parts, named = [], {}
    order = sorted((bits for bits in results if "rows" in results[bits]), key=int, reverse=True)
    for i, bits in enumerate(order):
        rows = [r for r in results[bits]["rows"] if "failed" not in r]
        # Also where nothing runs: what needs a larger cap has no point there.
        caps = sorted({r["cap"] for r in results[bits]["rows"]}, key=lambda c: math.inf if c is None else c)
        y = TOP + 22 + i * ROW
        gb = lambda value: value / 1e9 if value else None
        read = [gb(late(r)["read"]) for r in rows] + [gb(v) for r in rows for v in r["least"].values()]
        read += [gb(belady(r, results[bits]["conditions"]["tokens"])) for r in rows]
        read = [v for v in read if v and v >= 1e-3]
        speed = Panel(LEFT, y, f"{bits} bits, warm", "tokens/s", caps, [late(r)["rate"] for r in rows])
        bytes_ = Panel(LEFT + WIDTH + GAP, y, f"{bits} bits, read per token", "GB", caps, read)
        for name in dict.fromkeys(r["engine"] for r in rows):
            named[name] = (name, COLOURS.get(name, "#15803d"), False)
            mine = [r for r in rows if r["engine"] == name]
            speed.curve([(r["cap"], late(r)["rate"]) for r in mine], named[name][1], name)
            bytes_.curve([(r["cap"], gb(late(r)["read"])) for r in mine], named[name][1], name)
        least = {r["cap"]: r["least"] for r in rows}
        for key, (colour, name) in DASHED.items():
            named[name] = (name, colour, True)
            bytes_.curve([(cap, gb(least[cap][key])) for cap in caps if cap in least], colour, name, True)
        tokens, name = results[bits]["conditions"]["tokens"], "needed, the future known"
        future = [(r["cap"], gb(belady(r, tokens))) for r in rows if r["engine"] == "moec"]
        if any(value for _, value in future):
            named[name] = (name, FUTURE, True)
            bytes_.curve(future, FUTURE, name, True)
        parts += speed.out + bytes_.out
    width, height = LEFT + 2 * WIDTH + GAP + 30, TOP + len(order) * ROW
    style = ("text{font:12px sans-serif;fill:#374151}.title{font-weight:bold;font-size:14px}.unit{fill:#6b7280}"
             ".grid{stroke:#e5e7eb;stroke-width:1}")
    body = "\n".join([*legend([*dict.fromkeys(named.values())], 20, width), *parts])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
            f'<style>{style}</style>\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n')
