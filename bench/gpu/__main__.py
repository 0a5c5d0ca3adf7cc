"""The study of a GPU: builds, runs the ladder and the GPU tests, and measures.

``python -m bench.gpu --out DIR [--only first] [--minutes 9] [--small | --dry-run] [--list]``

``--only first`` runs only the ladder, which tests the features in a minute. DIR gets a JSON file, its table, and a log
of all output, which are updated during the run.

Exit codes: 0 done; 1 the build, a rung or a GPU test failed (the file has the other measurements); 2 wrong command
line; 3 a requirement is missing, nothing ran.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.gpu import preflight


def main() -> int:
    options = _arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before anything loads OpenMP
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # with 8, lanes share queues and wait for each other
    if message := preflight.bring_bundle():
        print(message, flush=True)
    missing = preflight.missing_packages()
    if missing:
        print(preflight.how_to_bring(missing), flush=True)
    wrong = list(preflight.missing_tools(to_build=not options.no_build))
    wrong += [f"{package.name} is missing and required" for package in missing if not package.without]
    if not options.dry_run and not options.list:
        why = preflight.why_no_gpu()
        wrong += [] if why is None else [f"no GPU: {why}; add --dry-run to rehearse without one"]
    if wrong:
        print("\n".join(["Cannot run:", *(f"  {line}" for line in wrong)]), file=sys.stderr)
        return 3
    from bench.gpu.run import list_parts, run, unknown_names

    if options.list:
        list_parts()
        return 0
    if strange := unknown_names(options.only):
        print(f"--only {strange[0]}: unknown part or group; see --list", file=sys.stderr)
        return 2
    return run(options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the result, the table and the log")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="run all code paths on the GPU at minimal sizes")
    sizes.add_argument("--dry-run", action="store_true", help="run all code paths on the host at minimal sizes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a part or a group (see --list); may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list all parts in order and exit")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--commit", default="", help="commit of the code, if this is not a clone")
    parser.add_argument("--no-build", action="store_true", help="use the installed package")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.list:
        parser.error("--out DIR is needed")
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes}; use more than 0")
    return arguments


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit would wait for processes that hang in the driver
