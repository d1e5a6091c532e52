"""Prints the page of all settings: ``python -m adder_flax.settings > docs/settings.md``.

With ``--json-schema`` it is the JSON schema of a run's configuration, for editors and other tools.
"""

import itertools
import json
import sys

from adder_flax.settings import RunSettings, declarations, json_schema, shown

_HEAD = """# Settings

Every field of a configuration; `python -m adder_flax.settings` makes this page from `adder_flax/settings/`, where they
are declared. On the command line each is `--config.<field>=<value>`; an experiment file, and the data after its colon,
have defaults of their own for some (`experiments/common.py`). A configuration is read as a whole before anything is
computed or written: whatever is outside its range, missing, unknown or in contradiction is named in one message.
`python -m adder_flax.settings --json-schema` prints the same for editors and other tools.

*data*: the number is data of the compiled step, and runs that differ in it alone can share one program.
"""  # noqa: E501 - lines of another language


def page() -> str:
    """Returns the page as Markdown: a table for each section."""
    tables: dict[str, list[str]] = {}
    for path, declared in declarations(RunSettings):
        section = path.rpartition(".")[0] or "The run"
        head = [f"\n## {section}\n", "| field | what it is | default | expected | |"]
        lines = tables.setdefault(section, [*head, "|---|---|---|---|---|"])
        reason = declared.reason
        if declared.only is not None:
            other, readers = declared.only
            reason += f"; with {other} {' or '.join(readers)} only"
        kind = "data" if declared.data else ""
        cells = f"`{path}`", reason, f"`{shown(declared.default)}`", declared.expected, kind
        row = " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells)
        lines.append(f"| {row} |")
    return "\n".join([_HEAD, *itertools.chain(*tables.values())])


if __name__ == "__main__":
    print(json.dumps(json_schema(RunSettings), indent=2) if "--json-schema" in sys.argv else page())
