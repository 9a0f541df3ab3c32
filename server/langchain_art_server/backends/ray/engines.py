"""The engines of a server that are on a Ray cluster: its samplers and its learner."""

from __future__ import annotations

from langchain_art.ray.cluster import connect
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler
from langchain_art_server.backends.ray.place import RayPlace
from langchain_art_server.backends.vllm.sampler import VllmSampler, gpus_of_replica
from langchain_art_server.config import Settings

#: What runs as a rank other than 0, which it is started beside.
RANK = "langchain_art_server.backends.peft.distributed.rank_process:serve"
#: vLLM's share of a GPU that it has alone, as is vLLM's own default.
_WHOLE_GPU = 0.9


def ray_samplers(settings: Settings) -> list[ProcessSampler]:
    """One for each of ``sampler.replicas``; joins the cluster.

    Raises:
        ConfigError: the cluster cannot be joined.
    """
    assert settings.ray is not None
    connect(settings.ray.address)
    chosen, needs = settings.sampler, replica_needs(settings)
    own = {"replicas": 1}
    if chosen.kind == "vllm" and settings.device != "cpu" and chosen.gpu_memory is None:
        own |= {"gpu_memory": _WHOLE_GPU}
    # One that is alone on its node, as far as it can see.
    alone = settings.model_copy(update={"sampler": chosen.model_copy(update=own)})
    found: list[ProcessSampler] = []
    for number in range(chosen.replicas):
        place = RayPlace(f"Replica {number}", needs, settings.ray.start_seconds)
        if chosen.kind == "vllm":
            found.append(VllmSampler(alone, number, place))
        else:
            found.append(TransformersSampler(alone, place=place))
    return found


def learner_place(settings: Settings) -> RayPlace:
    """Place of the learner, a rank on each actor. The cluster must be joined."""
    assert settings.ray is not None
    chosen = settings.learner
    others = [RANK] * (chosen.ranks - 1) if chosen.kind == "peft" else []
    needs = learner_needs(settings)
    return RayPlace("The learner", needs, settings.ray.start_seconds, others)


def learner_needs(settings: Settings) -> dict[str, float]:
    """Resources, in Ray's terms, that each rank of the learner takes of one node."""
    assert settings.ray is not None
    if settings.ray.learner is not None:
        return settings.ray.learner
    needs: dict[str, float] = {"CPU": settings.learner.threads or 1}
    if settings.device != "cpu":
        needs["GPU"] = 1
    return needs


def replica_needs(settings: Settings) -> dict[str, float]:
    """Resources, in Ray's terms, that a replica takes of one node."""
    assert settings.ray is not None
    if settings.ray.replica is not None:
        return settings.ray.replica
    chosen = settings.sampler
    needs: dict[str, float] = {"CPU": chosen.threads or 1}
    if chosen.kind == "vllm" and settings.device != "cpu":
        needs["GPU"] = gpus_of_replica(chosen.args)
    return needs
