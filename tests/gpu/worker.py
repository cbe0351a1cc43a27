"""A process that checks cases of a stage as their names come in; of a rank of many, one case.

    python -m tests.gpu.worker STAGE DEVICE BACKEND DESCRIPTOR

Each line of its input is the name of a case; each line that it answers is JSON.
"""

import importlib
import json
import logging
import os
import sys
import time
import traceback
import warnings


def main():
    stage, kind, backend, descriptor = sys.argv[1:]
    # Forked ranks use CUDA; this process may only count devices, by NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    warnings.simplefilter("ignore")
    import torch

    import tests.tiny  # noqa: F401
    from torchtitan.device import Device, allocator_settings
    from torchtitan.logging import logger

    os.environ["PYTORCH_ALLOC_CONF"] = allocator_settings()  # which a run sets before CUDA starts
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    device = Device("cuda" if kind == "cuda" else "cpu")
    check = importlib.import_module(f"tests.gpu.{stage}").check
    with os.fdopen(int(descriptor), "w") as answers:
        for line in sys.stdin:
            begin = time.monotonic()
            answer = {"case": line.strip(), "ends": kind == "cuda" and stage in ("many", "systems")}
            try:
                answer["figures"] = check(line.strip(), device, backend)
            except BaseException as error:
                answer["error"] = f"{type(error).__name__}: {error}"
                answer["traceback"] = traceback.format_exc()
                # After a failed assertion of a kernel, nothing works on the device in this process.
                answer["ends"] |= isinstance(error, torch.AcceleratorError)
            answer["seconds"] = round(time.monotonic() - begin, 1)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
