"""One module in a process of its own under MPS; see ``mosaic.microbench.sharing.mps``."""

from __future__ import annotations

import json
import os
import sys
import time


def main(argument: str) -> None:
    """Reads a start time and a number of steps per line of standard input; prints each end time."""
    settings = json.loads(argument)
    # The driver reads these when it is first called, which importing torch does not.
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = settings["pipes"]
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(settings["percentage"])
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the daemon selects devices, and numbers them from 0
    import torch

    from mosaic.microbench.kernels import default_subjects

    device = torch.device("cuda", settings["ordinal"])
    subject = default_subjects(settings["scale"], device)[settings["which"]]
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        while time.perf_counter_ns() < request["at_ns"]:
            pass
        for _ in range(request["steps"]):
            outputs = subject.forward()
            if settings["backward"]:
                subject.backward(outputs)
            del outputs
        torch.cuda.synchronize(device)
        print(json.dumps(time.perf_counter_ns()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
