"""The plug-in as a stand-in imitates it: the same reports, written when the engine is warm, as SGLang's warm-up request makes them."""

from __future__ import annotations

import itertools
import os
import uuid

from sglang_rollout.plugin.reports import CACHE_KEY, NAMES, REQUESTS_FILE, names_file, process_label, scheduler_file, write_report
from sglang_rollout.plugin.settings import read_run, read_settings
from sglang_rollout.testing.boot import Boot


def report_plugin(boot: Boot) -> None:
    """Write the reports of all processes of an engine with the plug-in; none if its environment names no folder. Raises OSError."""
    settings, _ = read_settings(os.environ)
    if not settings.reports or not boot.setup.plugin:
        return
    folder = os.path.join(settings.reports, read_run(os.environ) or uuid.uuid4().hex)
    common = {"release": boot.setup.version, "pid": os.getpid(), "port": boot.port, "seed": boot.seed}
    rows = [[name, list(held.shape), held.dtype] for name, held in boot.setup.tensors.items()]
    sizes = (boot.setup.data_size, boot.setup.pipeline_size, boot.setup.tensor_size)
    for dp, pp, tp in itertools.product(*map(range, sizes)):
        label = process_label(dp, pp, tp)
        names = {"load_format": "auto", "model": "StandIn", "tensors": rows, "complete": True, "tied": False}
        write_report(folder, names_file(label), names)
        place = {"rank": pp * sizes[2] + tp, "dp": dp, "pp": pp, "tp": tp, "hooks": [CACHE_KEY, NAMES]}
        write_report(folder, scheduler_file(label), {**common, **place, "names": names_file(label), "unchecked": ""})
    write_report(folder, REQUESTS_FILE, common)
