"""Plug-ins behind a guard: whatever their code does, only their own sink is affected."""

from outbox_relay.sinks.plugin.sink import PluginClass, PluginSink

__all__ = ["PluginClass", "PluginSink"]
