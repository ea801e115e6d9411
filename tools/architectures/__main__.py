"""`list`, `run`, `table`, `check`: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys
import warnings

import transformers

from . import register


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m architectures", description=__doc__)
    parser.add_argument("what", choices=("list", "run", "table", "check"))
    parser.add_argument(
        "names", nargs="*", help="types to run, by default all that types.json lists; for table, files of runs"
    )
    parser.add_argument("--into", help="a file of JSON lines to add to, and go on from")
    parser.add_argument("--cases", help="comma-separated numbers of run.CASES, by default all")
    parser.add_argument("--part", default="1/1", help="3/8: the third of eight parts")
    asked = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if asked.what == "list":
        warnings.simplefilter("ignore")
        found = register.survey()
        register.TYPES.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({"types": len(found["types"]), "left out": len(found["left_out"])}))
        return 0
    from . import run, table

    if asked.what == "table":
        table.merge(asked.names)
        table.write()
    if asked.what in ("table", "check"):
        lines = table.short()
        print("\n".join(lines))
        return int(bool(lines)) if asked.what == "check" else 0

    part, parts = map(int, asked.part.split("/"))
    cases = [run.CASES[int(i)] for i in asked.cases.split(",")] if asked.cases else run.CASES
    run.run((asked.names or register.listed())[part - 1 :: parts], asked.into, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
