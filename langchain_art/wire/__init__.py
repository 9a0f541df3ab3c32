"""All values that cross between client and server: small, frozen, pydantic only."""

from langchain_art.wire.calls import CallTags as CallTags, Turn as Turn, Usage as Usage
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
from langchain_art.wire.policies import (
    Checkpoint as Checkpoint,
    LoraConfig as LoraConfig,
    PolicySpec as PolicySpec,
    PolicyStatus as PolicyStatus,
    ServerStatus as ServerStatus,
)
from langchain_art.wire.reviews import (
    HUMAN_REWARD as HUMAN_REWARD,
    MAX_REVIEWS as MAX_REVIEWS,
    RefusedReview as RefusedReview,
    Review as Review,
    ReviewKind as ReviewKind,
    Reviews as Reviews,
    ReviewsKept as ReviewsKept,
)
from langchain_art.wire.train_config import (
    CISPO as CISPO,
    DPPOTV as DPPOTV,
    GSPO as GSPO,
    Advantage as Advantage,
    Aggregation as Aggregation,
    AnchorCredit as AnchorCredit,
    ClippedRatio as ClippedRatio,
    ConstantAggregation as ConstantAggregation,
    Credit as Credit,
    IcePop as IcePop,
    ImportanceSampling as ImportanceSampling,
    JobConfig as JobConfig,
    KLPenalty as KLPenalty,
    Loss as Loss,
    LRSchedule as LRSchedule,
    OverlongPenalty as OverlongPenalty,
    PreferenceConfig as PreferenceConfig,
    SequenceMask as SequenceMask,
    SFTConfig as SFTConfig,
    SimpleAdvantage as SimpleAdvantage,
    SimpleCredit as SimpleCredit,
    Standardized as Standardized,
    StepConfig as StepConfig,
    TrainConfig as TrainConfig,
    TruncatedIS as TruncatedIS,
    TurnCredit as TurnCredit,
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
