//! Labels, annotations, taints, finalizers and identities.

/// Pod label with the name of the Fargate profile that selected it.
pub const FARGATE_PROFILE: &str = "eks.amazonaws.com/fargate-profile";
/// Node label and taint key; also the pod annotation by which a pod opts out (`ec2`).
pub const COMPUTE_TYPE: &str = "eks.amazonaws.com/compute-type";
/// Value of [`COMPUTE_TYPE`] on our nodes.
pub const COMPUTE_TYPE_FARGATE: &str = "fargate";
/// Pod annotation with the size that the pod runs on, for instance `0.25vCPU 0.5GB`.
pub const CAPACITY_PROVISIONED: &str = "CapacityProvisioned";
/// Pod annotation with the state of log forwarding.
pub const LOGGING: &str = "Logging";
/// `spec.schedulerName` of every pod that a profile selected.
pub const SCHEDULER_NAME: &str = "fargate-scheduler";
/// Priority class of every pod that a profile selected.
pub const PRIORITY_CLASS: &str = "system-node-critical";
/// Value of [`PRIORITY_CLASS`].
pub const PRIORITY: i32 = 2_000_001_000;

/// Finalizer by which control frees the node, its lease and its certificate requests.
pub const CONTROL_FINALIZER: &str = "monopod.dev/control";
/// Finalizer by which control drains the pods of a profile.
pub const PROFILE_FINALIZER: &str = "monopod.dev/profile";
/// Finalizer by which a host ends the VM and frees its tap and disks.
pub const HOST_FINALIZER: &str = "monopod.dev/host";
/// Label on certificate requests: the environment they were made for.
pub const ENVIRONMENT: &str = "monopod.dev/environment";

/// Label on the lease of a host: the host's name.
pub const HOST: &str = "monopod.dev/host";

/// Annotation on a host: its namespace, by the rights in which it proves that it is one of the cluster.
pub const HOST_NAMESPACE: &str = "monopod.dev/host-namespace";

/// Label on nodes: the host on whose machine it is.
pub const TOPOLOGY_HOST: &str = "topology.monopod.dev/host";

/// Annotation on environments: when control decided on the pod, to the microsecond.
pub const REQUESTED_AT: &str = "monopod.dev/requested-at";

/// Annotation on a bootstrap token: the one host that may join with it.
pub const INVITED_HOST: &str = "monopod.dev/host";
/// Annotation on a bootstrap token: uid of the one certificate request that was approved for it.
pub const INVITATION_USED: &str = "monopod.dev/used-by";
/// Group of who has a token to join with; the API server demands the prefix.
pub const INVITED_GROUP: &str = "system:bootstrappers:monopod";
/// User names of who has a token are this prefix and the token's id.
pub const BOOTSTRAP_USER_PREFIX: &str = "system:bootstrap:";
/// Names of tokens are this prefix and their id.
pub const BOOTSTRAP_SECRET_PREFIX: &str = "bootstrap-token-";
/// Namespace of tokens.
pub const BOOTSTRAP_NAMESPACE: &str = "kube-system";

/// Service account annotation with the ARN of the IAM role that its pods' SDKs assume.
pub const IAM_ROLE: &str = "eks.amazonaws.com/role-arn";
/// Service account annotation: whom the token is for.
pub const IAM_AUDIENCE: &str = "eks.amazonaws.com/audience";
/// Service account annotation: `true` lets SDKs ask the region's STS.
pub const IAM_REGIONAL_STS: &str = "eks.amazonaws.com/sts-regional-endpoints";
/// Annotation of a service account, or of a pod before it: seconds that the token is good for.
pub const IAM_TOKEN_EXPIRATION: &str = "eks.amazonaws.com/token-expiration";
/// Pod annotation: containers, with commas between, that are given no role.
pub const IAM_SKIP_CONTAINERS: &str = "eks.amazonaws.com/skip-containers";
/// Pod label that keeps its service account's role from it.
pub const IAM_SKIP_POD: &str = "eks.amazonaws.com/skip-pod-identity-webhook";

/// EKS's own name for the webhook, so that tools which look for it find it.
pub const WEBHOOK: &str = "0500-amazon-eks-fargate-mutation.amazonaws.com";
/// The same webhook for `kube-system`, where pods are stored also while it does not answer.
pub const WEBHOOK_OF_KUBE_SYSTEM: &str =
    "kube-system.0500-amazon-eks-fargate-mutation.amazonaws.com";
/// Secret of `kube-system` with the authorities that sign the webhook's certificates.
pub const WEBHOOK_AUTHORITY: &str = "monopod-webhook-authority";
/// Who events on profiles are from.
pub const PROFILE_REPORTER: &str = "fargate-manager";

/// The lease by which one of several control processes acts, in `kube-system`.
pub const CONTROL_LEASE: &str = "monopod-control";
/// User name of the control process.
pub const CONTROL_USER: &str = "monopod:control";
/// Group of all host processes.
pub const HOSTS_GROUP: &str = "monopod:hosts";
/// User names of host processes are this prefix and the host's name.
pub const HOST_USER_PREFIX: &str = "monopod:host:";
/// Common name of the certificate with which the API server calls kubelets.
pub const KUBELET_CLIENT_USER: &str = "kube-apiserver-kubelet-client";

/// The kubelet's one port at a pod's address. 10250 belongs to the workload.
pub const KUBELET_PORT: u16 = 60250;
/// Where the node finds its task and its credentials; exists only inside the VM.
pub const METADATA_ADDRESS: std::net::Ipv4Addr = std::net::Ipv4Addr::new(169, 254, 170, 2);
