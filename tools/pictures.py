"""Pictures of README: a draft tree of SmolLM2 in a light and a dark form, and badges.

    eaglegbv generate "Why is the sky blue? Answer in two sentences." -m smollm2 --dtype float32 \
        --paths 4 --depth 4 --temperature 0.7 --seed 1 -n 48 --trace trace.json --trace-trees
    python tools/pictures.py trace.json   # keep its best step in docs/study/tree.json, and draw it
    python tools/pictures.py              # draw what is kept
"""

import html
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import eaglegbv

ROOT = Path(__file__).resolve().parents[1]
STUDY, BADGES = ROOT / "docs" / "study", ROOT / "docs" / "badges"
KEPT = STUDY / "tree.json"
TOP, LEFT, ROW, COLUMN, BOX, LETTER = 92, 82, 46, 156, 30, 8.2
WIDTH = 2 * LEFT + 5 * COLUMN
Tree: TypeAlias = dict[str, Any]


class Theme(NamedTuple):
    """Colours of a form of the picture."""

    text: str
    faint: str
    accepted: str
    rejected: str
    added: str


THEMES = {
    "light": Theme("#1f2328", "#57606a", "#1a7f37", "#cf222e", "#0969da"),
    "dark": Theme("#e6edf3", "#9198a1", "#3fb950", "#f85149", "#4493f8"),
}


def best_tree(trace: Path) -> Tree:
    """Return of a trace the tree of which most drafts were accepted, and those not too large."""
    text = trace.read_text(encoding="utf-8").strip().rstrip(",").removesuffix("]")
    events = json.loads(f"{text}]")
    trees = [tree for event in events for tree in event.get("args", {}).get("trees", ())]
    drawn = [tree for tree in trees if 6 <= len(tree["token_ids"]) <= 12]
    return max(drawn, key=lambda tree: (len(tree["accepted"]), len(tree["token_ids"])))


def positions(tree: Tree) -> list[tuple[int, float]]:
    """Return depth and row of every node: children below each other, parents beside the first."""
    parents = tree["parents"]
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    places = [(0, 0.0)] * len(parents)
    rows = 0

    def place(node: int, depth: int) -> None:
        nonlocal rows
        places[node] = (depth, float(rows))
        for number, child in enumerate(sorted(children[node], key=tree["accepted"].__contains__)):
            rows += number > 0
            place(child, depth + 1)
        if children[node]:
            inside = [places[child][1] for child in children[node]]
            places[node] = (depth, sum(inside) / len(inside))

    place(0, 0)
    return places


def shown(text: str) -> str:
    """Return a token's text as a picture has it."""
    return html.escape(
        text.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
    )


def tree_svg(tree: Tree, theme: Theme) -> str:
    """Return the picture of a tree."""
    places, accepted = positions(tree), set(tree["accepted"])
    height = TOP + ROW * (1 + max(row for _, row in places)) + 44
    parts, texts = [], [shown(text) for text in tree["texts"]]

    def middle(node: int) -> tuple[float, float]:
        depth, row = places[node]
        return LEFT + depth * COLUMN, TOP + ROW * (row + 0.5)

    def half(text: str) -> float:
        return max(22.0, LETTER * len(html.unescape(text)) / 2 + 11)

    def line(start: int, end: tuple[float, float], text: str, colour: str, wide: float) -> None:
        x0, y0 = middle(start)
        x0, x1, y1 = x0 + half(texts[start]), end[0] - half(text), end[1]
        bend = (x0 + x1) / 2
        curve = f"M{x0:.0f} {y0:.0f} C{bend:.0f} {y0:.0f} {bend:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
        parts.append(f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="{wide}"/>')

    def box(centre: tuple[float, float], text: str, colour: str, dash: str = "") -> None:
        x, y = centre
        left, top, wide = x - half(text), y - BOX / 2, 2 * half(text)
        parts.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{BOX}" rx="7" {dash}'
            f'fill="{colour}" fill-opacity=".14" stroke="{colour}" stroke-width="1.6"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" fill="{theme.text}" '
            f'font-family="monospace" font-size="14">{text}</text>'
        )

    for node, parent in enumerate(tree["parents"][1:], start=1):
        passed = node in accepted
        colour = theme.accepted if passed else theme.faint
        line(parent, middle(node), texts[node], colour, 3 if passed else 1.2)
    last, added = tree["accepted"][-1] if accepted else 0, shown(tree["next_text"])
    x, y = middle(last)
    end = (x + COLUMN, y + (ROW if last in tree["parents"][1:] else 0))
    line(last, end, added, theme.added, 3)
    for node, text in enumerate(texts):
        colour = theme.accepted if node in accepted else theme.rejected if node else theme.faint
        box(middle(node), text, colour)
    box(end, added, theme.added, 'stroke-dasharray="4 3" ')
    height = max(height, end[1] + 60)
    count = len(tree["committed"])
    told = f"One forward of SmolLM2 over {len(tree['texts']) - 1} drafted tokens commits {count}"
    legend = [
        ("accepted", theme.accepted),
        ("rejected", theme.rejected),
        ("the target's own", theme.added),
    ]
    keys = []
    for number, (word, colour) in enumerate(legend):
        left = 60 + 170 * number
        keys.append(
            f'<circle cx="{left}" cy="62" r="6" fill="{colour}"/>'
            f'<text x="{left + 14}" y="67" fill="{theme.faint}" font-size="14">{word}</text>'
        )
    title = (
        f'<text x="54" y="34" fill="{theme.text}" font-size="18" font-weight="600">{told}</text>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'font-family="sans-serif" role="img"><title>{told}</title>'
    )
    return "\n".join([head, title, *keys, *parts, "</svg>\n"])


def badge(name: str, value: str, colour: str) -> str:
    """Return a badge."""
    left, right = 12 + 7 * len(name), 12 + 7 * len(value)
    texts = "".join(
        f'<text x="{x:.0f}" y="14" text-anchor="middle">{html.escape(text)}</text>'
        for x, text in ((left / 2, name), (left + right / 2, value))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{name}: {value}</title>"
        f'<rect width="{left + right}" height="20" rx="3" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" rx="3" fill="{colour}"/>'
        f'<g fill="#fff" font-family="sans-serif" font-size="11">{texts}</g></svg>\n'
    )


def drawn() -> dict[Path, str]:
    """Return every picture by its file."""
    tree = json.loads(KEPT.read_text(encoding="utf-8"))
    pictures = {STUDY / f"tree_{name}.svg": tree_svg(tree, theme) for name, theme in THEMES.items()}
    badges = {
        "licence": ("licence", "Apache-2.0", "#0969da"),
        "python": ("python", "3.11 to 3.13", "#0969da"),
        "version": ("version", eaglegbv.__version__, "#1a7f37"),
    }
    return pictures | {BADGES / f"{name}.svg": badge(*facts) for name, facts in badges.items()}


def main() -> None:
    """Keep a tree if a trace is named; draw all."""
    if sys.argv[1:]:
        KEPT.write_text(json.dumps(best_tree(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    BADGES.mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
