"""Ports, paths, headers and variables of all processes. No other module defines any.

All fixed ports lie below 32768, the start of Linux's ephemeral range, because an outgoing connection can take a port above it. Engines
in the network of their node use other ports (``sglang_rollout.controller.render.names``).
"""

GATE_PORT = 30000
"""Port of the engine pod for all callers: haproxy, in front of engine and agent."""
ENGINE_PORT = 30001
"""``sglang.launch_server``, bound to 127.0.0.1 inside the engine pod."""
AGENT_PORT = 30002
"""The agent without Kubernetes. In an engine pod the agent listens on a Unix socket in a folder of gate and agent only."""
RENDEZVOUS_PORT = 30100
"""Port of rank 0 at which the ranks of an engine of several pods meet (``--dist-init-addr``).

SGLang takes a dozen ports from here on. Its ranks also use other ports.
"""
METRICS_PORT = 30003
"""Port ``metrics`` of engine and router pods: haproxy serves the metrics of each process of the pod, and no other path."""

PROBES_PORT = 30004
"""Port ``probes`` of engine and router pods: haproxy answers the kubelet's probes there, with connections of their own."""

FRONT_PORT = 30000
"""Port of the router pod for all callers, and the port of Service ``<name>-router``: the fleet's URL."""
GENERATE_PORT = 30005
"""Port of the router pod for data paths only, and the port of Service ``<name>-generate``. It refuses control calls."""
SMG_PORT = 30010
"""smg, bound to 127.0.0.1 inside the router pod."""
SMG_METRICS_PORT = 30011
"""smg's Prometheus endpoint (127.0.0.1)."""
COORDINATOR_PORT = 30020
"""The coordinator, bound to 127.0.0.1.

In a router pod this port answers the batch server's questions only. The front reaches the coordinator through a Unix socket.
"""
BATCHES_PORT = 30021
"""The batch server, bound to 127.0.0.1 inside the router pod; reached through the front."""
STORE_PORT = 30030
"""Calls of the coordinator to the weight store, with the store's credential."""
STAGING_PORT = 30031
"""Data port of the weight store and of the agents: index and pieces of staged versions, with a ticket."""

OPERATOR_METRICS_PORT = 8080
"""``/metrics`` of the operator."""
OPERATOR_HEALTH_PORT = 8081
"""``/healthz`` of the operator."""

# Paths on METRICS_PORT, all GET Prometheus text. ``/metrics`` is the path of the pod's main process.
METRICS = "/metrics"  # engine pod: SGLang; router pod: the coordinator
METRICS_AGENT = "/metrics/agent"
METRICS_GATE = "/metrics/gate"  # haproxy itself
METRICS_SMG = "/metrics/smg"
METRICS_FRONT = "/metrics/front"  # haproxy itself
METRICS_BATCHES = "/metrics/batches"

GATE_HEALTH = "/gate/health"  # on PROBES_PORT, GET 200: haproxy runs
FRONT_HEALTH = "/front/health"  # on PROBES_PORT and at the URL, GET 200: haproxy runs

TERM_HEADER = "X-Rollout-Term"
"""Request header of every coordinator → agent call: the coordinator's term. Agents refuse lower terms than the highest seen."""
DEADLINE_HEADER = "X-Rollout-Deadline"
"""Optional request header of coordinator → agent control calls: seconds after which the agent answers 504.

The engine continues the call, because SGLang cannot cancel it. Until the engine has answered, the agent refuses further calls with 409.
"""
VERSION_HEADER = "X-Weight-Version"
"""Reply header: label of the committed weight version."""
BROKEN_HEADER = "X-Engine-Broke-Off"
"""Reply header of a gate whose engine closed the connection before it answered. The front answers 502."""

MEMORY_VARIABLE = "SGLANG_ROLLOUT_MEMORY_BYTES"
"""Environment variable with the memory limit of the batch server's container."""

WIRE_VERSION = 1
"""Version of the messages in this package; sent in every status and discovery document."""

# Agent paths beside SGLang's own paths. Paths marked (open) need no token.
AGENT_HEALTH = "/agent/health"  # (open) GET 200: the agent runs
AGENT_ENGINE = "/agent/engine"  # (open) GET 200: the engine's process is up and has finished warming up (start-up probe and readiness)
AGENT_GATE = "/agent/gate"  # (open) GET 200: the gate may be open; haproxy's health check
AGENT_METRICS = "/agent/metrics"  # (open) GET Prometheus text
AGENT_GROUP = "/agent/group"  # POST MemberReport -> GroupReply: another pod of the same engine; sent to pod 0
AGENT_SYNC = "/agent/sync"  # POST SyncRequest -> AgentStatus
AGENT_RUN = "/agent/run"  # POST SyncRequest -> AgentStatus: as AGENT_SYNC, and the engine generates again after a pause
AGENT_PREFLIGHT = "/agent/preflight"  # POST PreflightRequest -> PreflightReply
AGENT_CHECKPOINT = "/agent/checkpoint"  # POST CheckpointRequest -> CheckpointReply: can the engine load this folder?
AGENT_ACK = "/agent/ack"  # POST AckRequest -> AgentStatus: the engine holds this version completely
AGENT_FENCE = "/agent/fence"  # POST FenceRequest -> AgentStatus: give up an incomplete update: gate closed, engine not paused

AGENT_STAGE = "/agent/stage"  # POST StageRequest -> AgentStatus: copy a version into the pod
AGENT_DROP = "/agent/drop"  # POST DropRequest -> AgentStatus: delete the copy of an update that failed
AGENT_ACTIVATE = "/agent/activate"  # POST ActivateRequest -> ActivateReply: load a copy into the engine

# From the head pod of an engine to its member pods. AGENT_PREFLIGHT and AGENT_CHECKPOINT are sent to them as well.
MEMBER_STAGE = "/agent/member/stage"  # POST StageRequest -> MemberStageReply: copy a version into the pod
MEMBER_DROP = "/agent/member/drop"  # POST DropRequest -> MemberStageReply: delete the copy of an update
MEMBER_ATTEMPT = "/agent/member/attempt"  # POST AttemptRequest -> AttemptReply: prepare a load of a copy by the ranks of the pod
MEMBER_VERDICTS = "/agent/member/verdicts"  # POST AttemptRequest -> AttemptReply: what these ranks have done

# Paths of the weight store on STORE_PORT. All but the first need the store's credential; an answer without another type is a StoreStatus.
STORE_HEALTH = "/store/health"  # (open) GET 200: the store runs
STORE_STATUS = "/store/status"  # POST {}
STORE_PREFLIGHT = "/store/preflight"  # POST PreflightRequest -> PreflightReply
STORE_JOIN = "/store/join"  # POST StoreGroupRequest
STORE_LEAVE = "/store/leave"  # POST StoreGroupRequest
STORE_OPEN = "/store/open"  # POST StoreOpenRequest
STORE_RECEIVE = "/store/receive"  # POST StoreReceiveRequest
STORE_SEAL = "/store/seal"  # POST StoreSealRequest
STORE_DROP = "/store/drop"  # POST StoreDropRequest
STORE_FETCH = "/store/fetch"  # POST StageRequest with a digest: copy a version from agents that hold it; answered when it is complete

STORE_COMMIT = "/store/commit"  # POST StoreCommitRequest: this version is committed; a snapshot may be due
STORE_READ = "/store/read"  # POST StoreReadRequest -> StoreReadReply
STORE_VERIFY = "/store/verify"  # POST StoreVerifyRequest -> StoreVerifyReply; answered when all files have been read

# Paths on STAGING_PORT. {update} is the ID of an update.
STAGED = "/staged"  # GET {STAGED}/{update}/index?from=N&wait=S -> IndexReply; GET {STAGED}/{update}/pieces/{shard}/{piece} -> bytes
FLEET_UPDATES = "/fleet/updates"
# At the store: PUT {FLEET_UPDATES}/{update}/pieces/{shard}/{piece}; GET {FLEET_UPDATES}/{update} -> UploadStatus
TICKET_HEADER = "X-Rollout-Ticket"
"""Request header: the ticket of a version, for reading or for uploading it."""
DIGEST_HEADER = "X-Rollout-Digest"
"""Header of an uploaded piece: the SHA-256 of the bytes, hexadecimal."""
BASE_HEADER = "X-Rollout-Base"
"""Header with the digest of another version. With a body, it says that the body is the difference from the same piece of that version. In
a GET request it says that the reader has that version, so the answer may be a difference."""

# Coordinator paths beside SGLang's own paths.
FLEET = "/fleet"  # GET FleetDocument
CHECK_MODEL_FIELD = "check_model"
"""Field of an update call and of an upload. False: the engines' model may lack these tensors."""
FLEET_TENSORS = "/fleet/tensors"  # GET ModelTensors: names and shapes of the model that the engines were started with
FLEET_HEALTH = "/fleet/health"  # GET 200: the coordinator runs (liveness); no statement about engines
FLEET_RUN = "/fleet/run"  # POST: the next update opens a new run
FLEET_ENGINES = "/fleet/engines"  # POST {FLEET_ENGINES}/{engine}/{call}: a trainer's call at one engine's own URL; GET: may it call?
FLEET_CLAIM = "/fleet/claim"  # POST: hold the fleet; {"take_over": true}: although another trainer holds it
FLEET_LEASE = "/fleet/lease"  # POST: the trainer's heartbeat
FLEET_HELD = "/fleet/held"  # GET 200: an interruption keeps all engines from serving, so the front sends data requests to the batch server
FLEET_SERVING = "/fleet/serving"  # GET Serving: what the batch server needs to know of the fleet
FLEET_CALLER = "/fleet/caller"  # GET ?path=: 204, or the refusal of a data request, whose caller the batch server names
FLEET_METRICS = "/fleet/metrics"  # GET Prometheus text

# Paths of the batch server beside SGLang's data paths.
BATCHES_HEALTH = "/batches/health"  # GET 200: the batch server runs (liveness)
BATCHES_METRICS = "/batches/metrics"  # GET Prometheus text
BATCHES_ABORT = "/batches/abort"  # POST HeldAbort -> HeldAbortReply: end requests that no engine has
