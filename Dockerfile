# The image of outbox-relay. It does not run as root, writes nothing to its own file system, and reads
# /etc/outbox-relay/relay.toml, which is mounted into it. docs/deploying.md shows how.
#
# The digest always names the same base image, without the fixes of Python and Debian that came after it. To build on
# another: docker build --build-arg BASE=python:3.11-slim@sha256:… .
ARG BASE=python:3.11.16-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${BASE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements-build.lock requirements-relay.lock ./
# pip and the build tools are in an environment of their own. The environment that is shipped contains neither.
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --quiet --require-hashes -r requirements-build.lock \
 && python3 -m venv --without-pip /opt/outbox-relay \
 && /opt/build/bin/pip --python /opt/outbox-relay/bin/python install --quiet \
    --require-hashes --only-binary :all: -r requirements-relay.lock
COPY pyproject.toml README.md LICENSE ./
COPY schema schema
COPY outbox_relay outbox_relay
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
 && /opt/build/bin/pip --python /opt/outbox-relay/bin/python install --quiet --no-deps dist/*.whl


FROM ${BASE}

LABEL org.opencontainers.image.title="outbox-relay" \
      org.opencontainers.image.description="Transactional outbox relay for PostgreSQL: to Kafka and webhooks" \
      org.opencontainers.image.licenses="Apache-2.0"

# Remove the base image's pip. USER below is numeric, so that an orchestrator can verify that it is not root.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/* \
 && groupadd --gid 10001 relay \
 && useradd --uid 10001 --gid relay --no-log-init --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin relay

COPY --from=build /opt/outbox-relay /opt/outbox-relay

ENV PATH=/opt/outbox-relay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OUTBOX_RELAY_CONFIG=/etc/outbox-relay/relay.toml \
    OUTBOX_RELAY_HTTP__LISTEN=0.0.0.0:8080

USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# Is the process alive? A database that is down is no reason to restart it. bash asks, because Python takes longer to start.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/localhost/${OUTBOX_RELAY_HTTP__LISTEN##*:} && printf 'GET /livez HTTP/1.0\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["outbox-relay"]
CMD ["run"]
