"""Training with replicas that may fail: coordinators, and the loop that votes before it updates."""

from functional_optim.replicas.alone import Local as Local
from functional_optim.replicas.alone import Scripted as Scripted
from functional_optim.replicas.buckets import Reduction as Reduction
from functional_optim.replicas.coordinator import Coordinator as Coordinator
from functional_optim.replicas.coordinator import Decision as Decision
from functional_optim.replicas.diloco import DiLoCoState as DiLoCoState
from functional_optim.replicas.diloco import diloco as diloco
from functional_optim.replicas.faults import CutOff as CutOff
from functional_optim.replicas.faults import Delay as Delay
from functional_optim.replicas.faults import Kill as Kill
from functional_optim.replicas.faults import Slow as Slow
from functional_optim.replicas.faults import random_faults as random_faults
from functional_optim.replicas.local_sgd import LocalSGDState as LocalSGDState
from functional_optim.replicas.local_sgd import local_sgd as local_sgd
from functional_optim.replicas.loop import Replica as Replica
from functional_optim.replicas.loop import ReplicaState as ReplicaState
from functional_optim.replicas.simulated import Simulated as Simulated
from functional_optim.replicas.simulation import Simulation as Simulation
from functional_optim.replicas.simulation import SimulationResult as SimulationResult
from functional_optim.replicas.torchft import TorchFT as TorchFT
from functional_optim.replicas.torchft import as_coordinator as as_coordinator
from functional_optim.synced import Synced as Synced
