"""``spec.model`` of an SGLangRollout: the model and the source of its files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sglang_rollout.api.engine_spec import EnvVar, Resources
from sglang_rollout.api.network_spec import ABSOLUTE
from sglang_rollout.api.schema import QUANTITY, ApiModel, map_list, plain_path, rule, rules, with_rules
from sglang_rollout.sglang.api import HUB_NAME

OWN_FOLDERS = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var/run")  # noqa: S108
"""Folders of images and of the operator, which a mount would hide."""

OBJECT_STORES = "^([sS]3|[gG][sS]|[aA][zZ])://"
"""Addresses that SGLang accepts as names of models although they contain a colon (0.5.23, ``utils/runai_utils.py``)."""

MODELS = "/models"
"""Default mount path of model files."""

MODEL_PATH_ENV = "MODEL_PATH"
"""Environment variable with ``model.path`` for the command of a download."""


class ModelVolume(ApiModel):
    """Volume of the model files, which engine and agent mount read-only. One of `claim` and `hostPath`."""

    model_config = with_rules(
        rule("has(self.claim) != has(self.hostPath)", "model.volume takes exactly one of claim and hostPath."),
        rule(
            f"!{list(OWN_FOLDERS)}.exists(f, self.mountPath == f || self.mountPath.startsWith(f + '/'))",
            "model.volume.mountPath would hide a folder that the images or the operator need: use another path, for example /models.",
            field=".mountPath",
        ),
    )

    claim: str | None = Field(default=None, min_length=1, max_length=253)
    """PersistentVolumeClaim in the namespace of this object. Engines on several nodes need one that many nodes can mount."""
    host_path: str | None = Field(default=None, max_length=1024, pattern=ABSOLUTE, json_schema_extra=plain_path("model.volume.hostPath"))
    """Folder of the node. It must exist, unless `model.download` fills it."""
    mount_path: str = Field(default=MODELS, max_length=1024, pattern=ABSOLUTE, json_schema_extra=plain_path("model.volume.mountPath"))
    """Mount path in the containers."""


class Download(ApiModel):
    """A command that downloads the model before the engine starts, in an init container with the engine's image."""

    command: list[Annotated[str, Field(min_length=1, max_length=65536)]] = Field(min_length=1, max_length=64)
    """Command and arguments, for example `["hf", "download", "Qwen/Qwen2.5-7B-Instruct", "--local-dir", "$(MODEL_PATH)"]`.
    `$(MODEL_PATH)` is `model.path`. The command runs at every start of a pod, so it must end quickly if all files exist."""
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra=map_list()
        | rules(
            rule(
                f"!self.exists(e, e.name == '{MODEL_PATH_ENV}')",
                f"model.download.env must not set {MODEL_PATH_ENV}: it is model.path. Use another name.",
            )
        ),
    )
    """Environment variables of the command, for example `HF_TOKEN` from a Secret."""
    resources: Resources = Resources()
    """CPU and memory of the command. Values that are set replace the defaults of docs/operations/sizing.md."""


class Model(ApiModel):
    """The model that engines serve before the first weight update, and its name."""

    model_config = with_rules(
        rule(
            "!has(self.volume) || self.path == self.volume.mountPath || self.path.startsWith(self.volume.mountPath + '/')",
            "model.path must lie under model.volume.mountPath (/models if it is left out): the engine reads the model from there.",
            field=".path",
        ),
        rule(
            f"!has(self.download) || has(self.volume) || self.path.startsWith('{MODELS}/')",
            f"model.download without model.volume fetches into a volume of the pod at {MODELS}: model.path must lie under it.",
            field=".path",
        ),
        rule(
            "!self.path.startsWith('-') && (!has(self.servedName) || !self.servedName.startsWith('-'))",
            "model.path and model.servedName must not begin with a hyphen: SGLang would take them for flags. Use another name, or ./"
            " before the path.",
        ),
        rule(
            f"has(self.servedName) || !self.path.contains(':') || self.path.matches('{OBJECT_STORES}')",
            "model.path has a colon, and SGLang allows none in the name of a model, which is the path if no other is given: set"
            " model.servedName.",
            field=".path",
        ),
    )

    path: str = Field(min_length=1, max_length=4096, json_schema_extra=plain_path("model.path"))
    """Value of SGLang's `--model-path`: a Hugging Face name, or a path in the engine container (in `volume`, `download`, or a
    mount of `podTemplate`)."""
    volume: ModelVolume | None = None
    """Volume of the model files. Without it they are in the image, in a mount of `podTemplate`, or on the network."""
    download: Download | None = None
    """Download the files before the engine starts: into `volume`, or into a volume that is deleted with the pod."""
    cache_size: str = Field(default="500Gi", max_length=32, pattern=QUANTITY)
    """Limit of a pod's own volume for the files that it downloads: those of a Hugging Face name, or of `download` without `volume`. They
    are on the disk of the node (ephemeral storage), and are deleted with the pod. A pod that exceeds the limit is evicted."""
    offline: bool = False
    """The engine sends no requests to Hugging Face (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`). A download may."""
    served_name: str | None = Field(default=None, min_length=1, max_length=256, pattern=r"^[^:\s]+$")
    """Name of the model in `/v1/models` and in OpenAI requests. Default: `path`. SGLang allows no colon in it."""
    load_format: str = Field(default="auto", min_length=1, max_length=64, pattern=r"^[a-z_]+$")
    """SGLang's `--load-format`, for example `auto`, `safetensors`, or `dummy` for random weights until the first update."""
    trust_remote_code: bool = False
    """Run Python code of the model's repository. Only for repositories that you trust."""

    @property
    def is_fetched_by_engine(self) -> bool:
        """True if the engine itself downloads the files: the path is a name on Hugging Face, and no field says where its files are."""
        return HUB_NAME.fullmatch(self.path) is not None and self.volume is None and self.download is None and not self.offline
