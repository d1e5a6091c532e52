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
Measured: test accuracy 0.9806 (dot), 0.9833 (additive), 0.9778 (adder), 0.9833 (adder without
identity), and of the adder in 8, 6 and 4 bits 0.9778, 0.9750, 0.9417.
"""

import json
import re
import sys
from pathlib import Path

RUNS = {
    "dot": "dot product",
    "additive": "additive",
    "adder_off": "adder, no identity",
    "adder": "adder",
}
TITLE = "A transformer in your browser"
_DATA = re.compile(r'(?<=type="application/json">).*?(?=</script>)')


def main(runs: str) -> None:
    networks, page, data = [], "", {}
    for run, name in RUNS.items():
        page = Path(runs, run, "web.html").read_text()
        data = json.loads(_DATA.findall(page)[0])
        for network in data["networks"]:
            bits = "" if network["name"] == "float32" else f", {network['name']}"
            networks.append(network | {"name": name + bits})
    told = json.dumps(data | {"networks": networks}, separators=(",", ":")).replace("<", "\\u003c")
    page = _DATA.sub(lambda _: told, page)
    page = re.sub(r"(?<=<title>).*?(?=<)|(?<=<h1>).*?(?=<)", TITLE, page)
    (Path(__file__).parent / "play" / "digits.html").write_text(page)


if __name__ == "__main__":
    main(sys.argv[1])
