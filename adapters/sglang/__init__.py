"""SGLang on page-major KV caches: the engine's own plugin mechanism, no fork, nothing changed unless asked for.

Install pm_ops next to SGLang, then ``PM_OPS=1``. :class:`pm_ops.adapters.sglang.config.Settings` says what can be asked
for, ``pm-ops doctor sglang`` what is possible here.
"""
