"""What a recipe may say (`schema`), read from TOML (`tables`), checked (`parsing`), and whether its
parts go together (`compatibility`)."""

from gesso.config.schema import (
    FAMILIES as FAMILIES,
)
from gesso.config.schema import (
    MAX_SAMPLES as MAX_SAMPLES,
)
from gesso.config.schema import (
    MAX_SIDE as MAX_SIDE,
)
from gesso.config.schema import (
    MAX_STEPS as MAX_STEPS,
)
from gesso.config.schema import (
    PACKAGE as PACKAGE,
)
from gesso.config.schema import (
    WRITERS as WRITERS,
)
from gesso.config.schema import (
    ZOO as ZOO,
)
from gesso.config.schema import (
    AnyModel as AnyModel,
)
from gesso.config.schema import (
    Beta as Beta,
)
from gesso.config.schema import (
    Data as Data,
)
from gesso.config.schema import (
    Draws as Draws,
)
from gesso.config.schema import (
    Dtype as Dtype,
)
from gesso.config.schema import (
    Ema as Ema,
)
from gesso.config.schema import (
    Eval as Eval,
)
from gesso.config.schema import (
    Family as Family,
)
from gesso.config.schema import (
    Learner as Learner,
)
from gesso.config.schema import (
    Lora as Lora,
)
from gesso.config.schema import (
    Model as Model,
)
from gesso.config.schema import (
    Named as Named,
)
from gesso.config.schema import (
    Optimizer as Optimizer,
)
from gesso.config.schema import (
    Recipe as Recipe,
)
from gesso.config.schema import (
    RemoteEntry as RemoteEntry,
)
from gesso.config.schema import (
    RewardEntry as RewardEntry,
)
from gesso.config.schema import (
    Sampler as Sampler,
)
from gesso.config.schema import (
    Save as Save,
)
from gesso.config.schema import (
    Source as Source,
)
from gesso.config.schema import (
    Strict as Strict,
)
from gesso.config.schema import (
    TokenModel as TokenModel,
)
from gesso.config.schema import (
    Tracker as Tracker,
)
from gesso.config.schema import (
    TrainSource as TrainSource,
)
from gesso.config.schema import (
    Urls as Urls,
)
from gesso.config.schema import (
    Vllm as Vllm,
)
from gesso.config.schema import (
    Writes as Writes,
)
from gesso.config.schema import (
    family as family,
)
from gesso.config.schema import (
    pick_device as pick_device,
)
from gesso.config.schema import (
    resolve_path as resolve_path,
)
from gesso.config.schema import (
    web_addresses as web_addresses,
)
