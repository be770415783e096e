"""Work on GPUs that comes late. With WAYBILL_TEST=late_streams=SEED a stream of which torch records
an event has nothing to do for a while: what another stream reads without waiting for it, or
overwrites while it is read, is then another result.
"""

import random

from waybill import _core

CYCLES = 4_000_000  # at most: some 2 ms


def install():
    """Once, before there are streams."""
    import torch

    draws = random.Random(_core.late_streams())
    record = torch.cuda.Event.record

    def record_and_delay(event, stream=None):
        stream = torch.cuda.current_stream() if stream is None else stream
        record(event, stream)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda._sleep(draws.randrange(CYCLES))

    torch.cuda.Event.record = record_and_delay
