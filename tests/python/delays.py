"""Work on GPUs that comes late. With WAYBILL_TEST_DELAYS=SEED a stream of which torch records an
event has nothing to do for a while behind it: what another stream reads without waiting for it, or
overwrites while it is read, is then another result.
"""

import os
import random

SEED = "WAYBILL_TEST_DELAYS"
CYCLES = 4_000_000  # at most: some 2 ms


def install():
    """Once, before there are streams."""
    import torch

    draws = random.Random(int(os.environ[SEED]))
    record = torch.cuda.Event.record

    def record_and_delay(event, stream=None):
        stream = torch.cuda.current_stream() if stream is None else stream
        record(event, stream)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda._sleep(draws.randrange(CYCLES))

    torch.cuda.Event.record = record_and_delay
