"""The command ``python -m simulations``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from simulations.study import STUDIES, get_study, parser_of
from spinformer.errors import SpinformerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study by name; the exit status is the study's, 2 for a wrong call or missing data."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m simulations",
        description="Run a study. `python -m simulations NAME --help` shows its options.",
    )
    parser.add_argument("--list", action="store_true", help="list the studies and stop")
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(STUDIES))
    # What follows the name belongs to the study, --help included.
    first = next((i for i, word in enumerate(arguments) if not word.startswith("-")), None)
    own = arguments if first is None else arguments[: first + 1]
    args = parser.parse_args(own)
    if args.list:
        width = max(map(len, STUDIES))
        for name in STUDIES:
            print(f"{name:<{width}}  {get_study(name).description}")
        return 0
    if args.name is None:
        parser.error(f"name a study ({', '.join(STUDIES)}), or --list")
    try:
        study = get_study(args.name)
    except ValueError as error:
        parser.error(str(error))

    parser = parser_of(study, f"python -m simulations {study.name}")
    try:
        return study.run(parser.parse_args(arguments[len(own) :]))
    except SpinformerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
