"""Prints the page of all settings: ``python -m adder_flax.settings > docs/settings.md``.

With ``--json-schema`` it is the JSON schema of a run's configuration, for editors and other tools.
"""

import json
import sys

from adder_flax.settings import RunSettings, json_schema
from adder_flax.settings._page import page

if __name__ == "__main__":
    print(json.dumps(json_schema(RunSettings), indent=2) if "--json-schema" in sys.argv else page())
