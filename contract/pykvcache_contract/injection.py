"""Why a labelled pod goes without the cache: one word each, the same in annotations, Events, metrics and docs."""

from enum import Enum


class SkipReason(Enum):
    """The word, and what it means with what to do about it. A message with the details goes with it."""

    POOL_NOT_FOUND = ("PoolNotFound", "There is no KVCachePool of that name.")
    POOL_DELETED = ("PoolDeleted", "The pool is being deleted.")
    POOL_UNREADABLE = (
        "PoolUnreadable",
        "The pool is of another version of py-kvcache than the webhook. Upgrade the one that is older.",
    )
    POOL_NOT_READY = (
        "PoolNotReady",
        "The pod would wait for its volume: the claim, the storage.path or the node agent is missing.",
    )
    NAMESPACE_NOT_ALLOWED = ("NamespaceNotAllowed", "The pool's allowedNamespaces does not admit the pod's namespace.")
    POD_SECURITY = (
        "PodSecurity",
        "Pod Security of the namespace would refuse the pod with the volume that this pool needs. Use volume CSI.",
    )
    NO_VLLM_CONTAINER = (
        "NoVLLMContainer",
        "No container is known to run vLLM. Name it by the annotation pykvcache.io/container.",
    )
    CONFIGURATION_PRESENT = (
        "ConfigurationPresent",
        "vLLM is given a kv-transfer-config already. Choose by the annotation pykvcache.io/on-conflict.",
    )
    BAD_ANNOTATION = ("BadAnnotation", "An annotation of ours has a value that cannot be used.")
    NAME_TAKEN = ("NameTaken", "The pod has a container, volume or mount path of its own that we need.")
    UNSUPPORTED_POD = (
        "UnsupportedPod",
        "The pod cannot have it: Windows, a static pod, too large already, or one that we cannot read.",
    )
    WEBHOOK_STARTING = (
        "WebhookStarting",
        "The webhook had just started, or the namespace was made a moment ago. A pod made again gets the cache.",
    )
    ERROR = ("Error", "A defect of ours; the log of the webhook has it. The pod is as it was.")

    def __init__(self, word: str, meaning: str) -> None:
        self.word, self.meaning = word, meaning
