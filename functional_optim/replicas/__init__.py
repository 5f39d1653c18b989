"""Training with replicas that may fail: coordinators, and a loop that votes before each update."""

from functional_optim.combinators.local_steps import Synced as Synced
from functional_optim.replicas.alone import Local as Local
from functional_optim.replicas.alone import Scripted as Scripted
from functional_optim.replicas.coordinator import Coordinator as Coordinator
from functional_optim.replicas.coordinator import Decision as Decision
from functional_optim.replicas.coordinator import Reduction as Reduction
from functional_optim.replicas.loop import Replica as Replica
from functional_optim.replicas.loop import ReplicaState as ReplicaState
from functional_optim.replicas.simulation.connection import Simulated as Simulated
from functional_optim.replicas.simulation.faults import CutOff as CutOff
from functional_optim.replicas.simulation.faults import Delay as Delay
from functional_optim.replicas.simulation.faults import Kill as Kill
from functional_optim.replicas.simulation.faults import Slow as Slow
from functional_optim.replicas.simulation.faults import random_faults as random_faults
from functional_optim.replicas.simulation.simulation import Simulation as Simulation
from functional_optim.replicas.simulation.simulation import SimulationResult as SimulationResult
from functional_optim.replicas.sync.diloco import DiLoCoState as DiLoCoState
from functional_optim.replicas.sync.diloco import diloco as diloco
from functional_optim.replicas.sync.local_sgd import LocalSGDState as LocalSGDState
from functional_optim.replicas.sync.local_sgd import local_sgd as local_sgd
from functional_optim.replicas.torchft import TorchFT as TorchFT
from functional_optim.replicas.torchft import as_coordinator as as_coordinator
