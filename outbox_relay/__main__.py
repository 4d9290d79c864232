import sys, os, pathlib
from outbox_relay import app, settings, telemetry
telemetry.configure(os.environ.get("OUTBOX_RELAY_LOG_LEVEL","info"), "json")
path=pathlib.Path(sys.argv[sys.argv.index("-c")+1])
load=lambda: settings.load(path, os.environ)
sys.exit(app.run(load(), load))
