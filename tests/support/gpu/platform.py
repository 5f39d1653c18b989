"""The device for tests as `gpu_check` sees a card."""

from contextlib import AbstractContextManager

import torch
from gpu_check.platform import WARM_UPS, Platform, Step

from gpu import device as fake


class FakePlatform(Platform):
    """Of two devices; its kernels are run by a driver that must be installed (`on_device`)."""

    captures = True

    def __init__(self) -> None:
        fake.load()
        super().__init__(torch.device(fake.DEVICE, 0))

    def devices(self) -> list[torch.device]:
        return [torch.device(fake.DEVICE, i) for i in range(2)]

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def no_waits(self) -> AbstractContextManager[None]:
        return fake.raising()

    def launched(self, step: Step) -> list[str]:
        with fake.logged() as names:
            step()
        return names

    def captured(self, step: Step) -> Step:
        for _ in range(WARM_UPS):
            step()
        with fake.capture() as graph:
            step()
        return graph.replay
