"""The sink of a plug-in, whose class a package brings."""

from outbox_relay.sinks.plugin.sink import PluginClass, PluginSink

__all__ = ["PluginClass", "PluginSink"]
