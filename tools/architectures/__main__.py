"""`list` writes types.json; `run` tries what it lists; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import warnings

import transformers

from . import register


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m architectures", description=__doc__)
    parser.add_argument("what", choices=("list", "run"))
    parser.add_argument("names", nargs="*", help="by default all that types.json lists")
    parser.add_argument("--into", help="a file of JSON lines to add to, and go on from")
    parser.add_argument("--part", default="1/1", help="3/8: the third of eight parts")
    asked = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if asked.what == "list":
        warnings.simplefilter("ignore")
        found = register.survey()
        register.TYPES.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({"types": len(found["types"]), "left out": len(found["left_out"])}))
        return
    from . import run

    part, parts = map(int, asked.part.split("/"))
    run.run((asked.names or register.listed())[part - 1 :: parts], asked.into)


if __name__ == "__main__":
    main()
