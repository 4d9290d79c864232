"""How fast the relay is on this machine: everything is started, filled and drained here, beside a bare loop.

`story` runs the scenarios in rounds and reports; each module of `scenarios` measures one thing; `place` is where they
do it: a database server, a broker, a directory. `figures`, `report` and `plot` are pure. What is measured runs in
processes of its own: relays as people start them, and `bare_loop`, `bare_posts`, `receiver` and `consumer` beside them.
"""
