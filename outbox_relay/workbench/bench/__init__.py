"""The benchmarks: what the relay costs on this machine, compared with bare loops in the same run.

`run` runs the scenarios in rounds and reports. Each module of `scenarios` measures one thing. `environment` provides
the database server, the broker and the processes of a run.
"""
