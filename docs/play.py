"""Joins the pages of four runs in docs/play/digits.html: each mechanism, and the adder in few bits.

Commands, some ten minutes of two CPU cores:
    size="--config.num_epochs=60 --config.model.width=48 --config.model.depth=3"
    size="$size --config.model.num_heads=3 --config.model.mlp_ratio=2"
    python main.py --workdir=runs/play/dot --config=deit_tiny $size
    python main.py --workdir=runs/play/additive --config=additive_deit_tiny $size
    python main.py --workdir=runs/play/adder --config=adder_deit_tiny $size
    python main.py --workdir=runs/play/adder_off --config=adder_deit_tiny $size \
        --config.model.identity=off
    for bits in 8 6 4; do
        python main.py --mode=quantize --weights=int$bits --workdir=runs/play/adder
    done
    for run in runs/play/*; do python main.py --mode=export --names=web --workdir=$run; done
    python docs/play.py runs/play
Without runs, `python docs/play.py` keeps the networks and takes the page around them anew.
Measured: test accuracy 0.9806 (dot), 0.9833 (additive), 0.9778 (adder), 0.9833 (adder without
identity), and of the adder in 8, 6 and 4 bits 0.9778, 0.9750, 0.9417.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RUNS = {
    "dot": "dot product",
    "additive": "additive",
    "adder_off": "adder, no identity",
    "adder": "adder",
}
TITLE = "A transformer in your browser"
_DATA = re.compile(r'(?<=type="application/json">).*?(?=</script>)')


def main(runs: str = "") -> None:
    here = Path(__file__).parent
    page, template = here / "play/digits.html", here.parent / "adder_flax/interop/web.html"
    data = _joined(runs) if runs else _data_of(page)
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    text = template.read_text().replace("<!-- TITLE -->", TITLE)
    page.write_text(text.replace("<!-- DATA -->", told))


def _joined(runs: str) -> dict[str, Any]:
    networks, data = [], {}
    for run, name in RUNS.items():
        data = _data_of(Path(runs, run, "web.html"))
        for network in data["networks"]:
            bits = "" if network["name"] == "float32" else f", {network['name']}"
            networks.append(network | {"name": name + bits})
    return data | {"networks": networks}


def _data_of(page: Path) -> dict[str, Any]:
    return json.loads(_DATA.findall(page.read_text())[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
