"""Draw the diagrams of the documentation as SVG files beside this file: ``python docs/diagrams/draw.py``.

The pictures follow the reader's colour scheme. The diagram of phases is drawn from the coordinator's table of transitions, and
``e2e/tests/test_docs.py`` fails if a committed file differs from what this program draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from sglang_rollout.coordinator.update.phases import TRANSITIONS, Phase

HERE = Path(__file__).parent
STYLE = """
:root { color-scheme: light dark; }
.paper { fill: #ffffff; } .box { fill: #f3f5f8; stroke: #5b6472; } .line { stroke: #5b6472; fill: none; } .head { fill: #5b6472; }
.soft { stroke: #9aa3af; } .lane { stroke: #c3c9d2; stroke-dasharray: 3 4; }
.bad { stroke: #b3402a; } .badhead { fill: #b3402a; }
.closed { fill: #f6ddd7; stroke: #b3402a; } .open { fill: #dcefdf; stroke: #2f7d3f; }
.data { stroke: #2b5fb3; } .datahead { fill: #2b5fb3; }
text { font: 13px system-ui, sans-serif; fill: #1d232b; } .small { font-size: 11.5px; fill: #48505c; } .strong { font-weight: 600; }
.c0 { fill: #9db7de; } .c1 { fill: #7fb5a8; } .c2 { fill: #d9a066; } .c3 { fill: #b79ad1; } .c4 { fill: #c98a8a; } .c5 { fill: #a9b26b; }
@media (prefers-color-scheme: dark) {
.paper { fill: #14181d; } .box { fill: #232a33; stroke: #97a1af; } .line { stroke: #97a1af; } .head { fill: #97a1af; }
.soft { stroke: #6b7583; } .lane { stroke: #4a525d; }
.bad { stroke: #e58a76; } .badhead { fill: #e58a76; }
.closed { fill: #4a2720; stroke: #e58a76; } .open { fill: #1f3d27; stroke: #7bc48b; }
.data { stroke: #86aef0; } .datahead { fill: #86aef0; }
text { fill: #e6eaf0; } .small { fill: #b4bcc8; }
.c0 { fill: #46669c; } .c1 { fill: #35786a; } .c2 { fill: #9a6226; } .c3 { fill: #735392; } .c4 { fill: #8f4b4b; } .c5 { fill: #6b7430; } }
"""


@dataclass
class Drawing:
    """A picture: its size, its description for screen readers, and its elements."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str], *, kind: str = "box") -> None:
        """Add a rectangle with centred text. The first line is bold."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        top = y + height / 2 - (len(lines) - 1) * 8 + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line, "strong" if number == 0 else "small")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Add one line of text."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def path(self, data: str, kind: str = "line", head: str = "head", *, dashed: bool = False) -> None:
        """Add a line. ``head`` names the class of its arrow head; an empty string draws none."""
        style = ' stroke-dasharray="5 4"' if dashed else ""
        end = f' marker-end="url(#{head})"' if head else ""
        self.parts.append(f'<path class="line {kind}" d="{data}" stroke-width="1.4"{style}{end}/>')

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path class="{name}" d="M0 0L8 4L0 8z"/></marker>'
            for name in ("head", "badhead", "datahead")
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" role="img">',
                f"<title>{escape(self.title)}</title><style>{STYLE}</style><defs>{heads}</defs>",
                f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


ROW = (Phase.IDLE, Phase.PAUSE, Phase.OPEN, Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT, Phase.RESUME)
"""Phases in the order of an update. PREPARE is only reported."""
STAGED_ROW = (Phase.IDLE, Phase.PAUSE, Phase.OPEN, Phase.STAGE, Phase.CANARY, Phase.ACTIVATE, Phase.COMMIT, Phase.RESUME)
"""Phases in the order of an update with transport Staged."""


def phases() -> Drawing:
    """Draw the phases of an update with transport Distributed."""
    return _draw_phases(ROW, "Phases of a weight update and their transitions")


def staged_phases() -> Drawing:
    """Draw the phases of an update with transport Staged."""
    return _draw_phases(STAGED_ROW, "Phases of a weight update with transport Staged, and their transitions")


def _draw_phases(row: Sequence[Phase], title: str) -> Drawing:
    """Draw the transitions of the coordinator's table: forward above the row, back below it."""
    # A staged update cannot fail any more once it is activated.
    ends = {Phase.RESUME, Phase.COMMIT} if Phase.ACTIVATE in row else {Phase.RESUME}
    width, gap, top = 92, 38 if len(row) < 8 else 24, 26 * len(row) - 16
    step = width + gap
    picture = Drawing(30 + step * len(row), top + 102 + 33 * (len(row) - 1), title)
    left = {phase: 32 + step * number for number, phase in enumerate(row)}
    arcs = [(before, after) for before in row for after in row if after in TRANSITIONS[before]]
    for before, after in arcs:
        distance = row.index(after) - row.index(before)
        if distance == 1:
            picture.path(f"M{left[before] + width} {top + 20}H{left[after] - 2}", "")
        elif distance > 1:
            x, y = left[before] + width * 0.62, left[after] + width * 0.38
            depth = top - 26 * distance
            picture.path(f"M{x:g} {top}C{x + 30:g} {depth:g} {y - 30:g} {depth:g} {y:g} {top - 2}", "soft")
        else:
            x, y = left[before] + width * 0.38, left[after] + width * (0.75 + 0.04 * distance)
            kind, head = ("bad", "badhead") if after is Phase.IDLE and before not in ends else ("soft", "head")
            depth = top + 40 - 44 * distance
            picture.path(f"M{x:g} {top + 40}C{x - 30:g} {depth:g} {y + 30:g} {depth:g} {y:g} {top + 42}", kind, head)
    for phase in row:
        kind = "open" if phase is Phase.IDLE else "box"
        picture.box(left[phase], top, width, 40, [phase.value], kind=kind)
    middle = picture.width / 2
    picture.text(middle, 24, "Forward: the steps of an update, and shorter ways", "small")
    back = "Back to idle: the update failed, was abandoned, or has ended. Other ways back: more calls of the same update"
    picture.text(middle, picture.height - 16, back, "small")
    return picture


LANES = ("trainer", "coordinator", "agents", "gates", "engines")
STEPS: tuple[tuple[str, str, str] | str, ...] = (
    "A process group is open: the trainer is rank 0, each tensor-parallel rank of an engine has a rank.",
    ("trainer", "coordinator", "begin_weight_update"),
    ("coordinator", "agents", "pause"),
    ("agents", "engines", "pause_generation"),
    ("coordinator", "agents", "begin"),
    ("agents", "agents", "record: dirty"),
    ("agents", "gates", "close"),
    ("agents", "engines", "begin_weight_update"),
    ("trainer", "coordinator", "bucket: names, shapes"),
    ("coordinator", "agents", "bucket"),
    ("agents", "engines", "update_weights_from_distributed"),
    ("trainer", "engines*", "broadcast of the tensors (NCCL, gloo)"),
    ("trainer", "coordinator", "end_weight_update"),
    ("coordinator", "agents", "end, compare checksums"),
    ("coordinator", "agents", "acknowledge"),
    ("agents", "agents", "record: clean (run, step)"),
    ("coordinator", "coordinator", "write the version to the record"),
    ("coordinator", "agents", "run (committed version)"),
    ("agents", "engines", "continue_generation"),
    ("agents", "gates", "open"),
    ("coordinator", "trainer", "200: committed"),
)


def update_sequence() -> Drawing:
    """Draw the calls of one weight update in order."""
    picture = Drawing(900, 90 + 38 * len(STEPS), "Sequence of a weight update")
    middle = {lane: 80 + 185 * number for number, lane in enumerate(LANES)}
    for lane, x in middle.items():
        picture.path(f"M{x} 54V{picture.height - 16}", "lane", "")
        picture.box(x - 62, 16, 124, 34, [lane])
    for number, step in enumerate(STEPS):
        y = 84 + 38 * number
        if isinstance(step, str):
            picture.text(450, y, step, "small")
            continue
        start, end, text = middle[step[0]], middle[step[1].rstrip("*")], step[2]
        if start == end:
            picture.path(f"M{start} {y - 10}h22v14h-20")
            picture.text(start + 30, y + 2, text, "small", "start")
            continue
        data = step[1].endswith("*")
        picture.path(f"M{start} {y}H{end - 2 if end > start else end + 2}", "data" if data else "", "datahead" if data else "head")
        picture.text((start + end) / 2, y - 6, text, "small")
    return picture


def gate() -> Drawing:
    """Draw when the gate of an engine is open."""
    picture = Drawing(860, 300, "The gate is open only while the engine is clean at the committed version")
    picture.box(30, 110, 190, 64, ["unknown", "after a start, a release"], kind="closed")
    picture.box(330, 110, 200, 64, ["clean (run, step)", "one known version"])
    picture.box(640, 110, 190, 64, ["dirty", "a mixture of versions"], kind="closed")
    picture.path("M220 130H328")
    picture.text(274, 102, "compared, or", "small")
    picture.text(274, 119, "acknowledged", "small")
    picture.path("M530 130H638", "bad", "badhead")
    picture.text(584, 119, "update begins", "small")
    picture.path("M640 158H532")
    picture.text(584, 184, "complete update", "small")
    picture.text(584, 200, "acknowledged", "small")
    picture.path("M430 110V60")
    picture.box(310, 16, 240, 42, ["gate open", "if the version is the committed one"], kind="open")
    picture.path("M735 174C735 262 125 262 125 176", "bad", "badhead")
    picture.text(430, 262, "the engine process starts again: a new boot ID, the weights of model.path", "small")
    picture.text(430, 284, "In every other case the gate is closed for new requests.", "small")
    return picture


def architecture() -> Drawing:
    """Draw the processes of a rollout and who calls whom."""
    picture = Drawing(900, 490, "Processes of a rollout")
    picture.box(30, 24, 180, 48, ["kubectl, Helm"])
    picture.box(30, 130, 180, 48, ["kube-apiserver"])
    picture.box(30, 250, 180, 60, ["operator", "creates objects, writes status"])
    picture.path("M120 72V128")
    picture.path("M120 250V180")
    picture.text(130, 218, "apply, status", "small", "start")
    picture.box(330, 24, 230, 48, ["trainer", "one URL: generate, push weights"])
    picture.parts.append('<rect class="soft line" x="290" y="112" width="580" height="122" rx="8"/>')
    picture.text(300, 130, "router pod", "small", "start")
    picture.box(304, 144, 136, 60, ["front", "haproxy: splits paths"])
    picture.box(474, 144, 116, 60, ["smg", "chooses an engine"])
    picture.box(612, 144, 104, 60, ["batch server", "splits batches"])
    picture.box(732, 144, 130, 60, ["coordinator", "control, updates"])
    picture.path("M400 72V142")
    picture.path("M440 164H472", "data", "datahead")
    picture.path("M440 184C470 222 580 222 622 206", "data", "datahead")
    picture.path("M612 174H592", "data", "datahead")
    picture.path("M430 204C480 240 680 240 742 206")
    picture.parts.append('<rect class="soft line" x="290" y="286" width="580" height="150" rx="8"/>')
    picture.text(868, 428, "engine pod, one StatefulSet per engine", "small", "end")
    picture.box(340, 334, 150, 72, ["gate", "haproxy: the pod's port", "open or closed"])
    picture.box(530, 334, 140, 72, ["engine", "SGLang", "on 127.0.0.1"])
    picture.box(710, 334, 140, 72, ["agent", "state of the engine,", "its control calls"])
    picture.path("M530 204C530 262 405 240 405 332", "data", "datahead")
    picture.path("M797 204C797 276 445 262 445 332")
    picture.path("M490 360H528", "data", "datahead")
    picture.path("M490 396C560 424 640 424 708 396")
    picture.path("M708 360H672")
    picture.path("M330 48H260V456H600V408", "data", "datahead", dashed=True)
    picture.text(270, 474, "transport Distributed: tensors, in a process group with the trainer", "small", "start")
    picture.text(868, 92, "blue: requests for tokens, and tensors", "small", "end")
    return picture


PHASE_TIMES = (
    ("2 real engines, 3.3 MB", (13, 22, 33, 15, 23, 16)),
    ("8 stand-ins, 11 KB", (16, 23, 29, 15, 17, 29)),
    ("2 real engines, 197 MB", (9, 24, 336, 37, 16, 19)),
    ("64 stand-ins, 11 KB", (87, 78, 166, 70, 84, 103)),
)
"""Milliseconds of each phase; docs/develop/benchmarks.md has the table and the conditions."""


def update_times() -> Drawing:
    """Draw the milliseconds of each phase of an update as bars."""
    picture = Drawing(860, 250, "Milliseconds of each phase of an update")
    for number, (name, times) in enumerate(PHASE_TIMES):
        y, x = 64 + 40 * number, 190.0
        picture.text(180, y + 16, name, "small", "end")
        for colour, milliseconds in enumerate(times):
            picture.parts.append(f'<rect class="c{colour}" x="{x:g}" y="{y}" width="{milliseconds:g}" height="24"/>')
            x += milliseconds
        picture.text(x + 8, y + 16, f"{sum(times)} ms", "small", "start")
    for colour, phase in enumerate(ROW[1:]):
        picture.parts.append(f'<rect class="c{colour}" x="{190 + 105 * colour}" y="24" width="14" height="14"/>')
        picture.text(210 + 105 * colour, 36, phase.value, "small", "start")
    return picture


def transports() -> Drawing:
    """Draw the path of a version with transport Distributed and with transport Staged, side by side."""
    picture = Drawing(940, 440, "The path of a version with transport Distributed and with transport Staged")
    picture.path("M400 20V424", "lane", "")
    _draw_distributed(picture)
    _draw_staged(picture)
    return picture


def _draw_distributed(picture: Drawing) -> None:
    picture.text(200, 34, "transport Distributed", "strong")
    picture.box(110, 50, 180, 48, ["trainer", "rank 0 of the process group"])
    for number in range(3):
        x = 22 + 124 * number
        picture.parts.append(f'<rect class="soft line" x="{x}" y="272" width="110" height="108" rx="8"/>')
        picture.text(x + 55, 372, "engine pod", "small")
        picture.box(x + 10, 284, 90, 56, ["engine", f"rank {number + 1}"])
        picture.path(f"M200 98C200 200 {x + 55} 180 {x + 55} 282", "data", "datahead")
    picture.text(186, 136, "one broadcast to all engines", "small", "end")
    picture.text(200, 412, "The engines are paused while the tensors arrive.", "small")


def _draw_staged(picture: Drawing) -> None:
    picture.text(670, 34, "transport Staged", "strong")
    picture.box(580, 50, 180, 48, ["trainer", "sends to one receiver"])
    picture.box(580, 150, 180, 48, ["weight store", "versions n and n+1"])
    picture.path("M670 98V148", "data", "datahead")
    picture.text(682, 128, "1. send: HTTP, or a process group of two", "small", "start")
    for number in range(3):
        x = 424 + 170 * number
        picture.parts.append(f'<rect class="soft line" x="{x}" y="252" width="152" height="142" rx="8"/>')
        picture.box(x + 8, 262, 136, 40, ["copies n and n+1"])
        picture.box(x + 8, 334, 136, 36, ["engine"])
        picture.path(f"M{x + 76} 302V332", "data", "datahead")
        picture.text(x + 84, 322, "3. load", "small", "start")
        picture.text(x + 76, 387, "engine pod", "small")
    picture.path("M620 198C620 232 500 222 500 260", "data", "datahead")
    picture.path("M670 198V260", "data", "datahead")
    picture.path("M738 292H770", "data", "datahead")
    picture.text(682, 228, "2. copy, also from pod to pod", "small", "start")
    picture.text(670, 420, "The engines generate in 1 and 2, and are paused in 3.", "small")


@dataclass(frozen=True)
class Span:
    """A stretch of a time line: class of its rectangle, start and end in pixels, and its text."""

    kind: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Push:
    """One push on a time line. Positions are pixels, and their distances mean nothing."""

    title: str
    lanes: tuple[tuple[str, tuple[Span, ...]], ...]
    phases: tuple[tuple[str, int], ...]
    """Each phase, and where it begins."""
    committed: int
    """Where the record names the version."""
    answered: int
    """Where the trainer receives the answer to the call that commits."""


PUSHES = (
    Push(
        "transport Distributed",
        (
            ("trainer", (Span("closed", 150, 780, "blocked"),)),
            (
                "every engine",
                (Span("open", 150, 200, ""), Span("closed", 200, 740, "paused"), Span("open", 740, 920, "generates: version n+1")),
            ),
        ),
        (("pause", 200), ("open", 260), ("transfer", 320), ("verify", 560), ("commit", 620), ("resume", 700)),
        660,
        780,
    ),
    Push(
        "transport Staged",
        (
            ("trainer", (Span("closed", 150, 420, "blocked"), Span("box", 420, 840, 'free with wait="staged"'))),
            (
                "first engine",
                (
                    Span("open", 150, 500, "generates: version n"),
                    Span("closed", 500, 620, "paused"),
                    Span("open", 620, 920, "generates: version n+1"),
                ),
            ),
            (
                "other engines",
                (
                    Span("open", 150, 600, "generate: version n"),
                    Span("closed", 600, 700, "paused"),
                    Span("open", 700, 920, "generate: version n+1"),
                ),
            ),
        ),
        (("stage", 150), ("canary", 500), ("activate", 600), ("commit", 700), ("resume", 760)),
        600,
        840,
    ),
)
"""One push with each transport, by a trainer that pauses nothing by itself."""


def push_times() -> Drawing:
    """Draw one push with each transport as a time line."""
    picture = Drawing(940, 342, "When the trainer is blocked and when engines are paused, with transport Distributed and with Staged")
    top = 8
    for push in PUSHES:
        picture.text(20, top + 20, push.title, "strong", "start")
        first, bottom = top + 32, top + 32 + 34 * len(push.lanes)
        for name, start in push.phases:
            picture.path(f"M{start} {first - 4}V{bottom + 16}", "lane", "")
            picture.text(start + 4, bottom + 14, name, "small", "start")
        for number, (lane, spans) in enumerate(push.lanes):
            y = first + 34 * number
            picture.text(140, y + 17, lane, "small", "end")
            for span in spans:
                picture.parts.append(f'<rect class="{span.kind}" x="{span.start}" y="{y}" width="{span.end - span.start}" height="26"/>')
                picture.text(span.start + 8, y + 17, span.text, "small", "start")
        for name, at in (("committed", push.committed), ("answer", push.answered)):
            picture.path(f"M{at} {first - 8}V{bottom if name == 'committed' else first + 26}", "data", "")
            picture.text(at, first - 12, name, "small")
        top = bottom + 36
    picture.text(20, top + 10, "Lengths are not to scale. The trainer of this picture does not pause the engines itself.", "small", "start")
    return picture


DRAWINGS = {
    "architecture.svg": architecture,
    "gate.svg": gate,
    "push-times.svg": push_times,
    "transports.svg": transports,
    "update-phases.svg": phases,
    "update-phases-staged.svg": staged_phases,
    "update-sequence.svg": update_sequence,
    "update-times.svg": update_times,
}


def drawn() -> Iterator[tuple[Path, str]]:
    """Yield path and content of each diagram."""
    for name, draw in DRAWINGS.items():
        yield HERE / name, draw().svg()


if __name__ == "__main__":
    for target, content in drawn():
        target.write_text(content)
