"""One module in a process of its own under MPS; see ``mosaic.microbench.sharing.mps``."""

from __future__ import annotations

import json
import os
import sys
import time


def main(argument: str) -> None:
    """Takes as many steps as each line of standard input asks for, from its time on; prints when they had ended."""
    given = json.loads(argument)
    # The driver reads these when it is first called, which importing torch does not.
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = given["pipes"]
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(given["percentage"])
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the daemon has it, and numbers what it shows from 0 on
    import torch

    from mosaic.microbench.modules import default_subjects

    device = torch.device("cuda", given["ordinal"])
    subject = default_subjects(given["scale"], device)[given["which"]]
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        while time.perf_counter_ns() < request["at_ns"]:
            pass
        for _ in range(request["steps"]):
            outputs = subject.forward()
            if given["backward"]:
                subject.backward(outputs)
            del outputs
        torch.cuda.synchronize(device)
        print(json.dumps(time.perf_counter_ns()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
