"""Everything that a GPU must show, in one command: builds, climbs the ladder, runs the gpu tests, measures.

``python -m bench.gpu --out DIR [--only first] [--minutes 9] [--small | --dry-run] [--list]``

``--only first`` is the ladder alone: a minute that says what holds on this machine. In DIR grow, from the first second,
a JSON file, the same as a table, and a log with everything that was printed.

Exit codes: 0 done; 1 the build, a rung or a gpu test failed (what could be measured is in the file all the same);
2 wrong command line; 3 something needed is missing, and nothing was run.
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
    wrong += [
        f"{package.name} is missing, and nothing can run without it" for package in missing if not package.without
    ]
    if not options.dry_run and not options.list:
        why = preflight.why_no_gpu()
        wrong += [] if why is None else [f"no GPU: {why}; to rehearse without one, add --dry-run"]
    if wrong:
        print("\n".join(["Cannot run:", *(f"  {line}" for line in wrong)]), file=sys.stderr)
        return 3
    from bench.gpu.run import list_parts, run, unknown_names

    if options.list:
        list_parts()
        return 0
    if strange := unknown_names(options.only):
        print(f"--only {strange[0]}: there is no such part or group; see --list", file=sys.stderr)
        return 2
    return run(options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result, the table and the logs")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="run every code path on the GPU at the smallest sizes")
    sizes.add_argument("--dry-run", action="store_true", help="run every code path on the host at the smallest sizes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a part or a group, see --list; repeat"
    )
    parser.add_argument("--list", action="store_true", help="name everything in order and stop")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--commit", default="", help="the code's commit, where this is no clone")
    parser.add_argument("--no-build", action="store_true", help="take the package that is installed")
    asked = parser.parse_args()
    if asked.out is None and not asked.list:
        parser.error("--out DIR is needed")
    if not asked.minutes > 0:
        parser.error(f"--minutes {asked.minutes}: a run needs some time")
    return asked


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process that hangs in the driver cannot be killed, and an ordinary exit would wait for it
