"""Reinforcement learning for LangGraph agents: the public names of the client.

They load on first use (PEP 562), so that importing the package, or only `langchain_art.wire`, stays
light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art._lazy_names import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads these imports too
    from langchain_art._version import __version__ as __version__
    from langchain_art.chat_models import ChatART as ChatART
    from langchain_art.client.async_client import AsyncArtClient as AsyncArtClient
    from langchain_art.client.local_server import LocalServer as LocalServer
    from langchain_art.client.sync_client import ArtClient as ArtClient
    from langchain_art.errors import (
        ArtError as ArtError,
        AuthenticationFailed as AuthenticationFailed,
        BodyTooLarge as BodyTooLarge,
        ConfigError as ConfigError,
        Conflict as Conflict,
        Damaged as Damaged,
        EngineUnavailable as EngineUnavailable,
        InvalidRequest as InvalidRequest,
        JobFailed as JobFailed,
        JudgeError as JudgeError,
        MethodNotAllowed as MethodNotAllowed,
        NotFound as NotFound,
        Overloaded as Overloaded,
        PermissionDenied as PermissionDenied,
        PromptTooLong as PromptTooLong,
        QuotaExceeded as QuotaExceeded,
        RateLimitExceeded as RateLimitExceeded,
        RequestRefused as RequestRefused,
        RequestTimeout as RequestTimeout,
        RolloutFailed as RolloutFailed,
        ServerUnreachable as ServerUnreachable,
        UnknownModel as UnknownModel,
    )
    from langchain_art.evaluators.base import GroupEvaluator as GroupEvaluator
    from langchain_art.evaluators.ruler.evaluator import (
        RulerEvaluator as RulerEvaluator,
        ruler_score_group as ruler_score_group,
    )
    from langchain_art.export.exporter import Exporter as Exporter
    from langchain_art.rollout.gather import (
        GatherResult as GatherResult,
        gather as gather,
        gather_sync as gather_sync,
    )
    from langchain_art.rollout.runner import Rollout as Rollout
    from langchain_art.tracing.handler import CaptureHandler as CaptureHandler
    from langchain_art.tracing.run import Run as Run
    from langchain_art.tracing.scope import capture as capture
    from langchain_art.training.records import (
        EvalResult as EvalResult,
        FitResult as FitResult,
        StepRecord as StepRecord,
    )
    from langchain_art.training.trainer import Trainer as Trainer
    from langchain_art.training.warm_start import WarmStart as WarmStart
    from langchain_art.wire import (
        AnchorCredit as AnchorCredit,
        CISPO as CISPO,
        ClippedRatio as ClippedRatio,
        ConstantAggregation as ConstantAggregation,
        DPPOTV as DPPOTV,
        OwnLoss as OwnLoss,
        Distillation as Distillation,
        GSPO as GSPO,
        IcePop as IcePop,
        KLPenalty as KLPenalty,
        LRSchedule as LRSchedule,
        OverlongPenalty as OverlongPenalty,
        PreferenceConfig as PreferenceConfig,
        SFTConfig as SFTConfig,
        SequenceMask as SequenceMask,
        SimpleAdvantage as SimpleAdvantage,
        SimpleCredit as SimpleCredit,
        Standardized as Standardized,
        TruncatedIS as TruncatedIS,
        TurnCredit as TurnCredit,
        KeyLimits as KeyLimits,
        LoraConfig as LoraConfig,
        Reward as Reward,
        TrainConfig as TrainConfig,
        TrainJob as TrainJob,
        TrainResult as TrainResult,
        Trajectory as Trajectory,
        TrajectoryGroup as TrajectoryGroup,
        Turn as Turn,
        Usage as Usage,
    )
else:  # a type checker takes the names imported above `as` themselves
    __all__, __getattr__, __dir__ = lazy_names(__name__)
