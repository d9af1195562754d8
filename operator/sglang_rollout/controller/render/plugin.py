"""How the plug-in reaches SGLang in an engine pod, and how its reports reach the agent: volumes, environment, arguments. Pure."""

from __future__ import annotations

from sglang_rollout.api.engine_spec import PluginUse, PrefixCache
from sglang_rollout.api.limits_spec import CUSTOM_LOGIT_PROCESSOR, written_limits
from sglang_rollout.api.pod_template import PLUGIN_VOLUME, REPORTS_VOLUME
from sglang_rollout.api.v1alpha1 import SGLangRollout
from sglang_rollout.controller.render import names
from sglang_rollout.controller.render.common import Object, memory_volume
from sglang_rollout.plugin.install import PLUGIN
from sglang_rollout.plugin.settings import RUN_VARIABLE, SETTINGS_VARIABLE, dump_settings

_REPORTS_SIZE = "512Mi"
"""Room for the names of the checkpoint's tensors, 10 MB for 100,000 tensors and each rank."""

VOLUMES: tuple[Object, ...] = (memory_volume(PLUGIN_VOLUME), {"name": REPORTS_VOLUME, "emptyDir": {"sizeLimit": _REPORTS_SIZE}})
"""Volumes of the engine pod."""
_PLUGIN_MOUNT: Object = {"name": PLUGIN_VOLUME, "mountPath": names.PLUGIN_DIR}
_REPORTS_MOUNT: Object = {"name": REPORTS_VOLUME, "mountPath": names.REPORTS_DIR}
AGENT_MOUNTS = (_PLUGIN_MOUNT, _REPORTS_MOUNT)
ENGINE_MOUNTS: tuple[Object, ...] = ({**_PLUGIN_MOUNT, "readOnly": True}, _REPORTS_MOUNT)
"""Mounts of the engine, which only reads the plug-in."""

START_LINES = f"""\
rm -rf {names.REPORTS_DIR}/*
export {RUN_VARIABLE}="$(cat {names.BOOT_FILE})"
export PYTHONPATH="{names.PLUGIN_DIR}${{PYTHONPATH:+:$PYTHONPATH}}"
test -z "${{SGLANG_PLUGINS:-}}" || export SGLANG_PLUGINS="$SGLANG_PLUGINS,{PLUGIN}"
"""
"""Lines of the start script after the boot ID is known. The image or the user may have folders of their own in ``PYTHONPATH``, and may
name the plug-ins that SGLang loads."""


def engine_variable(rollout: SGLangRollout) -> Object:
    """Return the variable with the settings of the plug-in."""
    engine = rollout.spec.engine
    value = dump_settings(
        reports=names.REPORTS_DIR,
        limits=written_limits(engine.limits),
        cache_key=engine.prefix_cache is PrefixCache.PER_VERSION,
        custom_logit_processors=CUSTOM_LOGIT_PROCESSOR in engine.args,
    )
    return {"name": SETTINGS_VARIABLE, "value": value}


def agent_arguments(rollout: SGLangRollout) -> list[str]:
    """Return the arguments of the agent about the plug-in."""
    engine = rollout.spec.engine
    optional = ["--plugin-optional"] if engine.plugin is PluginUse.OPTIONAL else []
    shared = ["--shared-prefix-cache"] if engine.prefix_cache is PrefixCache.SHARED else []
    return ["--plugin-dir", names.PLUGIN_DIR, "--reports-dir", names.REPORTS_DIR, *optional, *shared]
