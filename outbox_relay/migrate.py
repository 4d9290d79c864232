import pathlib, psycopg
def migrate(dsn, **k):
    with psycopg.connect(dsn) as c:
        c.execute(pathlib.Path("/work/main/schema/0001_outbox.sql").read_text()); c.execute("update outbox.meta set schema_version=1, min_relay=1")

def fit(v,m): return None
