"""Build the page `live`, for the site or on its own.

``python scripts/live.py`` writes the page without the rest of the site, and serves it locally.
"""

from __future__ import annotations

import argparse
import html
import http.server
import json
import math
import shutil
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
POLICIES = ROOT / "models" / "imdb-live-policies"
NETWORK = ("config.json", "tokenizer.json", "model.safetensors")
MODELS = {"gpt2-imdb-mini": NETWORK, "distilbert-imdb-mini": NETWORK}
MODELS |= {"ngram-imdb-judge": ("model.safetensors",)}
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
OPENINGS = (29, 22, 47, 40, 41, 44, 12, 59, 10, 34)  # rows of the held-out reviews
WORDS = 4  # of each review
HEAD = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport"
content="width=device-width, initial-scale=1"><title>Live: a policy before and after PPO</title>
<link rel="stylesheet" href="live/alone.css"></head><body><main>"""


def runs() -> list[dict]:
    """Return the policies' run records, in the slider's order."""
    paths = POLICIES.glob("*/run.json")
    records = [{"name": path.parent.name} | json.loads(path.read_text()) for path in paths]
    return sorted(records, key=lambda run: run["beta"])


def openings() -> list[str]:
    """Return the first words of some held-out reviews as HTML."""
    import pandas as pd

    texts = pd.read_parquet(ROOT / "models/imdb-openings/test-00000-of-00001.parquet")["text"]
    return [html.escape(" ".join(texts[row].split()[:WORDS])) for row in OPENINGS]


def rows() -> str:
    """Return an HTML table of measurements on held-out openings."""
    keys = "kl", "score", "second", "perplexity", "distinct_2"

    def row(name: str, head: str, values: dict) -> str:
        texts = [f"{values[key]:.{1 if key == 'perplexity' else 2}f}" for key in keys]
        cells = "".join(f"<td>{text}</td>".replace("-", "−") for text in texts)
        return f'<tr data-run="{name}"><td>{head}</td>{cells}</tr>'

    lines = [row(run["name"], f"{run['beta']:g}", run["after"]) for run in runs()]
    return row("", "reference", runs()[0]["before"]) + "".join(lines)


def axes(most: int, low: int, high: int) -> str:
    """Return SVG axes for scores (``low`` to ``high``) against √KL (0 to ``most``)."""
    name = "KL to the reference (nats, square-root scale)"
    tags = [f'<text x="350" y="226" text-anchor="end">{name}</text>']
    for tick in range(low, high + 1):
        y = 195 - (tick - low) * 180 / (high - low)
        number = f"{tick}".replace("-", "−")
        tags.append(f'<line x1="34" x2="350" y1="{y:.1f}" y2="{y:.1f}"/>')
        tags.append(f'<text x="28" y="{y + 4:.1f}" text-anchor="end">{number}</text>')
    for tick in range(most + 1):
        x = 34 + tick * 316 / most
        tags.append(f'<text x="{x:.1f}" y="210" text-anchor="middle">{tick**2}</text>')
    return "".join(tags)


def curve() -> str:
    """Return an SVG plot of both judges' scores against KL during training.

    The SVG group uses data coordinates, in which page.js moves the dot.
    """
    points = [point for run in runs() for point in run["path"]]
    both = [point[key] for point in points for key in ("score", "second")]
    most = math.ceil(math.sqrt(max(point["kl"] for point in points)))
    low = math.floor(min(both))
    high = math.ceil(max(both))
    across = 316 / most
    up = 180 / (high - low)
    place = f"translate(34 {195 + low * up:.2f}) scale({across:.4f} {-up:.4f})"
    lines = ""
    words = []
    for run in runs():
        for key, kind in (("score", "a"), ("second", "b")):
            steps = [f"{point['kl'] ** 0.5:.3f},{point[key]:.3f}" for point in run["path"]]
            which = f'data-run="{run["name"]}"'
            lines += f'<path class="{kind}" {which} d="M{"L".join(steps)}"/>'
            lines += f'<path class="{kind} dot" {which} d="M{steps[-1]}h0"/>'
        end = "β = {beta:g}: KL {kl:.1f}, score {score:.1f}, second judge {second:.1f}"
        words.append(end.format(**run, **run["after"]))
    dot = f'id="live-dot" class="dot" data-x="{most}" data-low="{low}" data-high="{high}"'
    label = f"Scores of both judges against KL during training. At the end: {'; '.join(words)}."
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 360 230">{axes(most, low, high)}'
        f'<g transform="{place}">{lines}<path {dot}/></g></svg>'
    )


def live_page() -> str:
    """Return the page's Markdown with embedded measurements."""
    points = [
        {"name": run["name"], "beta": run["beta"]}
        | {key: [point[key] for point in run["path"]] for key in ("kl", "score")}
        for run in runs()
    ]
    text = (HERE / "live.md").read_text(encoding="utf-8")
    texts = openings()
    insertions = {
        "opening": texts[0],
        "rows": rows(),
        "curve": curve(),
        "openings": "".join(f"<option>{text}</option>" for text in texts),
    }
    for name, inside in insertions.items():
        text = text.replace(f"{{{name}}}", inside)
    return f'{text}\n<script type="application/json" id="live-data">{json.dumps(points)}</script>\n'


def write_files(folder: Path) -> None:
    """Copy the page's files to ``folder``, at the paths from which the page fetches them."""
    shutil.copytree(HERE / "live", folder / "live", dirs_exist_ok=True)
    files = MODELS | {f"{POLICIES.name}/{run['name']}": ADAPTER for run in runs()}
    for name, kept in files.items():
        (folder / "models" / name).mkdir(parents=True, exist_ok=True)
        for file in kept:
            shutil.copy(ROOT / "models" / name / file, folder / "models" / name / file)


def write_alone(folder: Path) -> None:
    """Write the page and the files that it fetches to ``folder``, without the rest of the site."""
    import mistune

    index = folder / "index.html"
    if index.exists() and not index.read_text("utf-8", "replace").startswith(HEAD):
        raise FileExistsError(f"{index} is not this page. Choose another --output.")
    write_files(folder)
    page = live_page().split("---\n", 2)[2].replace("](../", "](")
    body = mistune.html(page)
    index.write_text(f"{HEAD}{body}</main></body></html>", encoding="utf-8")


def serve(folder: Path, port: int) -> None:
    """Serve a folder on localhost until Ctrl-C."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"Open http://127.0.0.1:{server.server_port}/ and stop with Ctrl-C.", flush=True)
        server.serve_forever()


def main() -> None:
    """Write the page to --output, and serve it until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "live")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    write_alone(chosen.output)
    serve(chosen.output, chosen.port)
