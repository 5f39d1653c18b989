"""torchft's Manager as a coordinator."""

import pytest
import torch

import functional_optim as fo
from functional_optim.replicas import Decision


# ---------------------------------------------------------------- torchft's Manager
class Manager:
    """What `TorchFT` uses of a torchft Manager, for a group of one; the real one runs in
    test_torchft."""

    def __init__(self):
        self.step, self.batches, self.committing, self.error = 4, 8, True, None
        self.calls = []

    def current_step(self):
        return self.step

    def num_participants(self):
        return 2

    def start_quorum(self):
        self.calls.append("quorum")
        self.error = None

    def allreduce(self, tensor, should_quantize=False):
        self.calls.append(tensor.numel())
        tensor.mul_(0.5)
        return _Done()

    def report_error(self, error):
        self.error = error

    def errored(self):
        return self.error

    def should_commit(self):
        committed = self.committing and self.error is None
        self.step += committed
        self.batches += 2 * committed
        return committed

    def state_dict(self):
        return {"step": self.step, "batches_committed": self.batches}

    def load_state_dict(self, known):
        self.step, self.batches = known["step"], known["batches_committed"]

    def shutdown(self):
        self.calls.append("shutdown")


class _Done:
    def wait(self):
        return True


def test_a_manager_is_one_coordinator_however_often_it_is_asked_for():
    manager = Manager()
    group = fo.replicas.as_coordinator(manager)
    assert fo.replicas.as_coordinator(manager) is group
    assert fo.replicas.as_coordinator(group) is group
    with pytest.raises(ValueError, match="has a coordinator already"):
        fo.replicas.TorchFT(manager)


def test_a_manager_is_asked_in_order():
    manager = Manager()
    group = fo.replicas.TorchFT(manager, bucket_bytes=8)
    assert group.step == 4
    group.start()
    grads = {"a": torch.full((3,), 4.0), "b": torch.ones(2, dtype=torch.float64)}
    mean = group.allreduce(grads).wait()
    assert mean["a"].tolist() == [2.0, 2.0, 2.0]
    assert grads["a"].tolist() == [4.0, 4.0, 4.0]
    assert manager.calls == ["quorum", 2, 1, 1, 1]
    assert group.decide() == Decision(True, False, 5, 2, "")
    group.report_error(ValueError("half-way"))
    assert manager.state_dict() == {"step": 4, "batches_committed": 8}
    group.close()
    assert manager.calls[-1] == "shutdown"


def test_a_managers_refusal_says_why():
    manager = Manager()
    group = fo.replicas.TorchFT(manager)
    group.start()
    group.report_error(ValueError("lost"))
    assert group.decide() == Decision(False, False, 4, 2, "ValueError: lost")
    manager.committing = False
    group.start()
    assert group.decide().reason == "another rank of this replica is against it"
    manager._min_replica_size = 3
    group.start()
    assert group.decide().reason == "2 replicas take part, but min_replica_size=3"
