"""Picture: one step of a StepProfile, host over device, and the mean steps as stacked bars. SVG by hand."""

from collections import Counter
from html import escape

from jpaged.profile.spans import WAIT, Span
from jpaged.profile.step_profile import DEVICE_ORDER, HOST_ORDER, READING, WAITING, StepProfile
from jpaged.profile.timeline import GAP, OTHER, Segment

COLOURS = {
    "schedule": "#1f77b4", "pack": "#17becf", "dispatch": "#9467bd", WAITING: "#e3e6ea", READING: "#8c564b",
    "update": "#2ca02c", "detokenise": "#bcbd22", "rest of the step": "#7f7f7f", "between steps": "#f4f4f4",
    "unpack": "#c5b0d5", "embed": "#98df8a", "norm": "#ffbb78", "qkv": "#1f77b4", "rope": "#aec7e8",
    "kv_write": "#17becf", "attention": "#d62728", "attention_output": "#ff9896", "mlp": "#2ca02c",
    "head": "#9467bd", "sample": "#e377c2", OTHER: "#9a9a9a", GAP: "#f4f4f4", WAIT: "#e3e6ea",
}  # fmt: skip
WIDTH, LEFT, RIGHT = 1120, 76, 24
PLOT = WIDTH - LEFT - RIGHT
_STYLE = "text{font:12px Verdana,DejaVu Sans,sans-serif;fill:#222}.t{font-size:15px;font-weight:bold}.s{fill:#666;font-size:11px}"


def draw(profile: StepProfile, title: str, subtitle: str) -> str:
    """The SVG's text."""
    begin, end = profile.sample[0].begin, profile.sample[-1].end
    scale = PLOT / (end - begin)
    body = [_text(LEFT, 26, title, "t"), _text(LEFT, 44, subtitle, "s")]
    body += [_text(LEFT, 74, f"One step in the trace, {(end - begin) / 1e6:.1f} ms")]
    body += _lane(84, "host", _host_pixels(profile.sample_host, begin, scale))
    body += _lane(118, "device", _device_pixels(profile.sample, begin, scale))
    body += _axis(152, (end - begin) / 1e6)
    body += [_text(LEFT, 206, f"The mean of {profile.num_steps} steps, {profile.host.step_ms:.1f} ms")]
    body += _bar(216, "host", profile.host.parts, HOST_ORDER, profile.host.step_ms)
    body += _bar(250, "device", profile.device, DEVICE_ORDER, profile.host.step_ms)
    host, y = _legend(300, "host", profile.host.parts, HOST_ORDER, profile.host.step_ms)
    device, y = _legend(y + 10, "device", profile.device, DEVICE_ORDER, profile.host.step_ms)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 6}" viewBox="0 0 {WIDTH} {y + 6}">'
    background = f'<rect width="{WIDTH}" height="{y + 6}" fill="#fff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", background, *body, *host, *device, "</svg>"]) + "\n"


def _host_pixels(spans: list[Span], begin: int, scale: float) -> list[tuple[float, float, str]]:
    """Every part at least half a pixel wide, so that the short ones are seen at all."""
    return [((s.begin - begin) * scale, max(s.length * scale, 0.5), s.name) for s in spans]


def _device_pixels(segments: list[Segment], begin: int, scale: float) -> list[tuple[float, float, str]]:
    """(x, width, group): each half pixel shows the group that has most of it, and equal neighbours are one."""
    shares = [Counter() for _ in range(2 * PLOT)]
    for segment in segments:
        at, end = (segment.begin - begin) * scale * 2, (segment.end - begin) * scale * 2
        for cell in range(int(at), min(int(end), len(shares) - 1) + 1):
            for group in segment.groups:
                shares[cell][group] += (min(end, cell + 1) - max(at, cell)) / len(segment.groups)
    result = []
    for cell, share in enumerate(shares):
        group = share.most_common(1)[0][0] if share else GAP
        if result and result[-1][2] == group:
            result[-1] = result[-1][0], result[-1][1] + 0.5, group
        else:
            result.append((cell / 2, 0.5, group))
    return result


def _lane(y: int, name: str, pieces: list[tuple[float, float, str]]) -> list[str]:
    frame = f'<rect x="{LEFT}" y="{y}" width="{PLOT}" height="26" fill="{COLOURS[GAP]}"/>'
    rects = [_rect(LEFT + x, y, min(width, PLOT - x), COLOURS[group], group) for x, width, group in pieces]
    return [_text(8, y + 17, name), frame, *rects]


def _bar(y: int, name: str, parts: dict[str, float], order: tuple[str, ...], step: float) -> list[str]:
    pieces, x = [_text(8, y + 17, name)], LEFT
    for part in order:
        width = parts.get(part, 0.0) / step * PLOT
        pieces.append(_rect(x, y, width, COLOURS[part], f"{part} {parts.get(part, 0.0):.2f} ms"))
        if width > 8 * len(part):
            pieces.append(_text(x + 5, y + 17, part))
        x += width
    return pieces


def _axis(y: int, total_ms: float) -> list[str]:
    step = next(s for s in (base * 10.0**power for power in range(-3, 6) for base in (1, 2, 5)) if total_ms / s <= 10)
    ticks = []
    for number in range(int(total_ms / step) + 1):
        x = LEFT + number * step / total_ms * PLOT
        ticks.append(f'<path d="M{x:.1f} {y}v5" stroke="#888"/>')
        ticks.append(_text(x - 3, y + 19, f"{number * step:g}" + (" ms" if number == 0 else ""), "s"))
    return ticks


def _legend(y: int, name: str, parts: dict[str, float], order: tuple[str, ...], step: float) -> tuple[list[str], int]:
    """Swatch, name, time and part, in four columns; and where the next thing may begin."""
    pieces, shown = [_text(8, y + 10, name)], [part for part in order if part in parts]
    for number, part in enumerate(shown):
        x, top = LEFT + number % 4 * PLOT / 4, y + number // 4 * 20
        pieces.append(f'<rect x="{x:.1f}" y="{top}" width="12" height="12" fill="{COLOURS[part]}" stroke="#999"/>')
        pieces.append(_text(x + 18, top + 10, f"{part} {parts[part]:.2f} ms, {parts[part] / step:.1%}"))
    return pieces, y + -(-len(shown) // 4) * 20


def _rect(x: float, y: int, width: float, colour: str, tip: str) -> str:
    tip = f"<title>{escape(tip)}</title>"
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="26" fill="{colour}">{tip}</rect>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{escape(text)}</text>"
