"""What is scheduled before trees and texts are known."""

from unittest import mock

import pytest
from vllm.v1.request import Request

from tests.scheduling.block_worker import NUM_NODES, AsyncEngine, make_scheduler


@pytest.mark.parametrize("grammar", [False, True])
def test_a_request_with_a_grammar_has_trees_only_where_vllm_waits_for_them(grammar):
    engine = AsyncEngine(make_scheduler(True), 0)
    engine.add(length=3, text=0, max_tokens=30)
    for _ in range(3):
        engine.step(NUM_NODES)
    scheduler, outputs = engine.scheduler, engine.outputs
    # As in a pause: nothing is in flight.
    while outputs:
        scheduler.update_from_output(*outputs.pop())
    with mock.patch.object(Request, "use_structured_output", grammar):
        first, second = scheduler.schedule(), scheduler.schedule()
    assert not first.pending_structured_output_tokens
    nodes = [
        list(map(len, o.scheduled_spec_decode_tokens.values())) for o in (first, second)
    ]
    assert nodes == [[] if grammar else [NUM_NODES], [NUM_NODES]]
    assert second.pending_structured_output_tokens == grammar
