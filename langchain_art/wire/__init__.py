"""All values that cross between client and server: small, frozen, pydantic only."""

from langchain_art.wire.calls import CallTags as CallTags, Turn as Turn, Usage as Usage
from langchain_art.wire.choices.credit import (
    Advantage as Advantage,
    AnchorCredit as AnchorCredit,
    Credit as Credit,
    OverlongPenalty as OverlongPenalty,
    SimpleAdvantage as SimpleAdvantage,
    SimpleCredit as SimpleCredit,
    Standardized as Standardized,
    TurnCredit as TurnCredit,
)
from langchain_art.wire.choices.losses import (
    CISPO as CISPO,
    DPPOTV as DPPOTV,
    OwnLoss as OwnLoss,
    Distillation as Distillation,
    GSPO as GSPO,
    Aggregation as Aggregation,
    ClippedRatio as ClippedRatio,
    ConstantAggregation as ConstantAggregation,
    IcePop as IcePop,
    ImportanceSampling as ImportanceSampling,
    KLPenalty as KLPenalty,
    Loss as Loss,
    SequenceMask as SequenceMask,
    TruncatedIS as TruncatedIS,
)
from langchain_art.wire.identifiers import (
    ID as ID,
    NAME as NAME,
    Finite as Finite,
    Id as Id,
    Message as Message,
    Name as Name,
    RewardValue as RewardValue,
    ScenarioName as ScenarioName,
    Several as Several,
    Tag as Tag,
    Wire as Wire,
    scenario_name as scenario_name,
)
from langchain_art.wire.api_keys import (
    ApiKey as ApiKey,
    KeyLimits as KeyLimits,
    KeySpec as KeySpec,
    LoggedAction as LoggedAction,
    NewApiKey as NewApiKey,
    Scope as Scope,
)
from langchain_art.wire.policies import (
    Checkpoint as Checkpoint,
    LoraConfig as LoraConfig,
    PolicySpec as PolicySpec,
    PolicyStatus as PolicyStatus,
    ReplicaStatus as ReplicaStatus,
    RolledBack as RolledBack,
    ServerStatus as ServerStatus,
    default_learning_rate as default_learning_rate,
    with_learning_rate as with_learning_rate,
)
from langchain_art.wire.queue.rollouts import (
    BatchStatus as BatchStatus,
    FinishedRollout as FinishedRollout,
    LeaseRequest as LeaseRequest,
    Leases as Leases,
    LeasesHeld as LeasesHeld,
    LeasesLost as LeasesLost,
    LeasesReturned as LeasesReturned,
    QueuedRollout as QueuedRollout,
    RolloutBatch as RolloutBatch,
    RolloutLease as RolloutLease,
    AttemptOutcome as AttemptOutcome,
    TakenRollouts as TakenRollouts,
    TakeRequest as TakeRequest,
    WorkerStatus as WorkerStatus,
)
from langchain_art.wire.reviews import (
    HUMAN_REWARD as HUMAN_REWARD,
    MAX_REVIEWS as MAX_REVIEWS,
    PlannedVerdict as PlannedVerdict,
    RefusedReview as RefusedReview,
    Review as Review,
    ReviewJobs as ReviewJobs,
    ReviewKind as ReviewKind,
    ReviewPlan as ReviewPlan,
    Reviews as Reviews,
    ReviewsKept as ReviewsKept,
    ReviewTraining as ReviewTraining,
    RunsToReview as RunsToReview,
    VerdictFate as VerdictFate,
)
from langchain_art.wire.train_config import (
    JobConfig as JobConfig,
    LRSchedule as LRSchedule,
    PreferenceConfig as PreferenceConfig,
    SFTConfig as SFTConfig,
    StepConfig as StepConfig,
    TrainConfig as TrainConfig,
)
from langchain_art.wire.training import (
    JobEvent as JobEvent,
    JobState as JobState,
    NodeReport as NodeReport,
    StepSeconds as StepSeconds,
    TrainJob as TrainJob,
    TrainRequest as TrainRequest,
    TrainResult as TrainResult,
    TrajectoryAudit as TrajectoryAudit,
    TurnAudit as TurnAudit,
)
from langchain_art.wire.trajectories import (
    NOT_HEARD as NOT_HEARD,
    Reward as Reward,
    Status as Status,
    Trajectory as Trajectory,
    TrajectoryGroup as TrajectoryGroup,
)
