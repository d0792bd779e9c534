"""Which gradients of earlier steps a recorded step frees, and when."""

import pytest
import torch

from monetrun.core.graph import FORWARD
from monetrun.runtime import holdings
from monetrun.runtime.gradients_before import GradientsBefore

CPU = torch.device("cpu")


def test_what_was_freed_is_found_however_the_script_does_it():
    whole, kept, by_hand = torch.zeros(3, 256), torch.zeros(64), torch.zeros(128)
    views = list(whole)  # as of torch.cat([q, k, v]): freed with the last of them
    gradients = [*views, kept, by_hand, torch.zeros(2, 2).to_sparse(), torch.zeros(0)]
    before = GradientsBefore(holdings.storages(gradients, CPU))
    places = {whole.untyped_storage().data_ptr(), by_hand.untyped_storage().data_ptr()}
    numbers = [{t.untyped_storage()._cdata: t.nbytes} for t in (kept, torch.zeros(8))]
    del gradients, whole
    before.look(0, True)
    del by_hand
    before.look(3, True)
    assert before.freed == {2: {max(before.freed[2]): 512}}
    views.clear()
    before.look(4, FORWARD == "outside")
    assert {stretch: list(found.values()) for stretch, found in before.freed.items()} == {2: [512], 4: [3 * 1024]}
    assert before.freed_bytes == 512 + 3 * 1024
    assert before.freed_places == places
    assert before.kept_bytes(numbers) == 256


@pytest.mark.parametrize("state", [None, [], {"step": 1}])
def test_an_optimizer_whose_state_is_none_that_torch_knows_has_no_bytes(state, monkeypatch):
    class Around(torch.optim.SGD):
        pass

    optimizer = Around([torch.nn.Parameter(torch.zeros(4))], 0.1)
    optimizer.state = state
    monkeypatch.setattr(holdings.hooks, "optimizers", lambda: [optimizer])
    assert holdings.state_bytes(CPU) == 0
    assert holdings.holdings(CPU, 100)["optimizer state"] == 0
