//! A cluster of a test's own.

use crate::remains::Site;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What a command printed, and whether it succeeded.
#[derive(Debug, Clone)]
pub struct Output {
    /// Whether its exit code was 0.
    pub success: bool,
    /// Its exit code; none if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// A running cluster, removed when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    directory: tempfile::TempDir,
    monopod: PathBuf,
    name: String,
    number: u8,
    flags: Vec<String>,
}

impl Cluster {
    /// Brings up a cluster. The number, 1 to 200, tells clusters of one machine apart.
    ///
    /// # Panics
    /// If the programs are not built or the cluster does not come up.
    pub fn up(number: u8) -> Self {
        Self::up_with(number, &[])
    }

    /// Brings up a cluster with more flags of `monopod up`.
    ///
    /// # Panics
    /// If the programs are not built or the cluster does not come up.
    pub fn up_with(number: u8, flags: &[&str]) -> Self {
        crate::interrupt::watch();
        let dist = std::env::var_os("MONOPOD_DIST")
            .expect("MONOPOD_DIST names the directory of built programs; run the tests by `cargo xtask test`");
        let cluster = Self {
            directory: tempfile::Builder::new()
                .prefix("monopod-test-")
                .tempdir()
                .expect("a temporary directory"),
            monopod: Path::new(&dist).join("monopod"),
            name: format!("mt{number}"),
            number,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        };
        let [open, closed] = cluster.registry_ports();
        let mirror =
            |port| format!("  \"127.0.0.1:{port}\": {{endpoint: [\"http://127.0.0.1:{port}\"]}}\n");
        let registries = format!("mirrors:\n{}{}", mirror(open), mirror(closed));
        std::fs::write(cluster.registries(), registries).expect("the file of registries");
        cluster.bring_up();
        cluster
    }

    /// Runs `monopod up` with this cluster's settings; the second time it finds it running.
    ///
    /// # Panics
    /// If the cluster does not come up.
    pub fn bring_up(&self) -> Output {
        self.bring_up_by(&self.monopod)
    }

    /// The same with the `monopod` of another release.
    ///
    /// # Panics
    /// If the cluster does not come up.
    pub fn bring_up_by(&self, monopod: &Path) -> Output {
        let number = u16::from(self.number);
        let (link, cidr) = (
            format!("100.64.{number}.0/30"),
            format!("10.{number}.0.0/16"),
        );
        let port = self.base_port().to_string();
        let registries = self.registries().display().to_string();
        let mut arguments = vec![
            "up",
            "--name",
            &self.name,
            "--link",
            &link,
            "--vpc-cidr",
            &cidr,
            "--base-port",
            &port,
            "--host-name",
            "host-1",
            // Each check has a profile of its own.
            "--max-profiles",
            "100",
            "--registries",
            &registries,
        ];
        arguments.extend(self.flags.iter().map(String::as_str));
        let output = self.run_by(monopod, &arguments, "");
        assert!(
            output.success,
            "monopod up failed\n{}\n{}\n{}",
            output.out,
            output.err,
            self.log("supervisor")
        );
        output
    }

    /// Loads an image that only tests use, as `monopod.local/NAME`.
    ///
    /// # Panics
    /// If it is not built.
    #[track_caller]
    pub fn load_test_image(&self, name: &str) {
        let archive = self.test_file(&format!("{name}.tar"));
        let reference = format!("monopod.local/{name}");
        let output = self.monopod(&["image", "load", &archive, "--name", &reference]);
        assert!(output.success, "image {name}: {}", output.err);
    }

    /// Runs helm as the administrator and gives what it printed.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn helm(&self, arguments: &[&str]) -> String {
        let output = Command::new(self.test_file("helm"))
            .args(arguments)
            .env("KUBECONFIG", self.data().join("kubeconfig/admin"))
            .env("HOME", self.data())
            .output()
            .expect("helm starts");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "helm {}: {err}",
            arguments.join(" ")
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a Python program on this machine, with boto3, moto and these variables, and gives what it
    /// printed. It is told where the API server and its authority's certificate are.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn python_with_sdk(&self, program: &str, variables: &[(String, String)]) -> String {
        let output = Command::new("python3")
            .args(["-c", program])
            .env("PYTHONPATH", self.test_file("sdk"))
            .env("HOME", self.data())
            .env(
                "API_SERVER",
                format!("https://100.64.{}.1:6443", self.number),
            )
            .env("CLUSTER_CA", self.data().join("pki/ca.crt"))
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .output()
            .expect("python3 starts");
        let (out, err) = (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(output.status.success(), "{out}{err}");
        out
    }

    /// What `cargo xtask test` made for tests alone.
    fn test_file(&self, name: &str) -> String {
        let beside = self.monopod.parent().unwrap_or_else(|| Path::new("/"));
        beside.join("tests").join(name).display().to_string()
    }

    /// The cluster's data directory.
    pub fn data(&self) -> &Path {
        self.directory.path()
    }

    /// Ports on loopback at which the cluster pulls without TLS, for registries of tests.
    pub fn registry_ports(&self) -> [u16; 2] {
        let first = 27_000 + 2 * u16::from(self.number);
        [first, first + 1]
    }

    fn registries(&self) -> PathBuf {
        self.data().join("registries.yaml")
    }

    /// Ports on loopback of the admin servers of control and host.
    pub fn admin_ports(&self) -> [u16; 2] {
        [self.base_port() + 4, host_port(self.number)]
    }

    /// The port on loopback at which all control processes answer for admission.
    pub fn webhook_port(&self) -> u16 {
        self.base_port() + 5
    }

    fn base_port(&self) -> u16 {
        base_port(self.number)
    }

    /// Prefix of the cluster's network namespace and devices.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where this machine's host keeps what it has.
    pub fn site(&self) -> Site {
        Site {
            data: self.data().to_owned(),
            name: self.name.clone(),
            namespace: None,
            port: host_port(self.number),
        }
    }

    /// Runs `monopod` for this cluster.
    pub fn monopod(&self, arguments: &[&str]) -> Output {
        self.run(arguments, "")
    }

    /// Starts `monopod` for this cluster, to be ended by the caller.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(&self, arguments: &[&str]) -> Child {
        Command::new(&self.monopod)
            .arg("--data")
            .arg(self.data())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("monopod starts")
    }

    /// Runs kubectl as the administrator, whatever comes of it.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Output {
        self.run(&[&["kubectl"], arguments].concat(), "")
    }

    /// Runs kubectl as the administrator and gives what it printed.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.try_kubectl(arguments);
        assert!(
            output.success,
            "kubectl {} failed: {}{}",
            arguments.join(" "),
            output.out,
            output.err
        );
        output.out
    }

    /// Runs kubectl with the kubeconfig of another user of the cluster, such as `host`.
    pub fn kubectl_as(&self, user: &str, arguments: &[&str], input: &str) -> Output {
        let kubeconfig = self.data().join("kubeconfig").join(user);
        let flag = format!("--kubeconfig={}", kubeconfig.display());
        self.run(&[&["kubectl", &flag], arguments].concat(), input)
    }

    /// Applies objects.
    ///
    /// # Panics
    /// If the API server refuses them.
    #[track_caller]
    pub fn apply(&self, manifest: &Value) {
        let output = self.try_apply(manifest);
        assert!(output.success, "not applied: {}", output.err);
    }

    /// Applies objects, whatever comes of it.
    pub fn try_apply(&self, manifest: &Value) -> Output {
        self.run(&["kubectl", "apply", "-f", "-"], &manifest.to_string())
    }

    /// An object; none if there is none.
    pub fn get(&self, namespace: &str, kind: &str, name: &str) -> Option<Value> {
        let output = self.try_kubectl(&[
            "get",
            "-n",
            namespace,
            kind,
            name,
            "-o",
            "json",
            "--ignore-not-found",
        ]);
        serde_json::from_str(&output.out).ok()
    }

    /// Waits until a rollout is done.
    ///
    /// # Panics
    /// If it is not in time.
    #[track_caller]
    pub fn rollout(&self, namespace: &str, object: &str, limit: Duration) {
        let timeout = format!("--timeout={}s", limit.as_secs());
        self.kubectl(&["rollout", "status", "-n", namespace, object, &timeout]);
    }

    /// The cluster IP of a service.
    ///
    /// # Panics
    /// If there is no such service, or it has none.
    #[track_caller]
    pub fn service_address(&self, namespace: &str, name: &str) -> String {
        let service = self.get(namespace, "service", name).expect("the service");
        let address = service["spec"]["clusterIP"].as_str();
        address.expect("an address").to_owned()
    }

    /// All objects of a kind in a namespace, or of a kind without namespaces.
    pub fn list(&self, namespace: &str, kind: &str) -> Vec<Value> {
        let text = self.kubectl(&["get", "-n", namespace, kind, "-o", "json"]);
        let list: Value = serde_json::from_str(&text).unwrap_or_default();
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// The environment of a pod.
    pub fn environment_of(&self, pod: &Value) -> Option<Value> {
        let uid = pod["metadata"]["uid"].as_str()?;
        self.get("", "environments", &monopod_api::names::environment(uid))
    }

    /// Waits until a pod is in a phase, and gives it.
    ///
    /// # Panics
    /// If it is not in time.
    #[track_caller]
    pub fn wait_phase(&self, namespace: &str, name: &str, phase: &str, limit: Duration) -> Value {
        crate::wait(&format!("pod {namespace}/{name} is {phase}"), limit, || {
            let pod = self
                .get(namespace, "pod", name)
                .ok_or("there is no such pod")?;
            if pod["status"]["phase"] == phase {
                Ok(pod)
            } else {
                Err(pod["status"].to_string())
            }
        })
    }

    /// Waits until a pod is Ready, and gives it.
    ///
    /// # Panics
    /// If it is not in time.
    #[track_caller]
    pub fn wait_ready(&self, namespace: &str, name: &str, limit: Duration) -> Value {
        crate::wait(&format!("pod {namespace}/{name} is Ready"), limit, || {
            let pod = self
                .get(namespace, "pod", name)
                .ok_or("there is no such pod")?;
            if is_ready(&pod) {
                Ok(pod)
            } else {
                Err(pod["status"].to_string())
            }
        })
    }

    /// The end of what a part of the cluster logged, for messages.
    pub fn log(&self, part: &str) -> String {
        let path = self.data().join("logs").join(format!("{part}.log"));
        let text = std::fs::read(path)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// The `monopod` program.
    pub fn program(&self) -> &Path {
        &self.monopod
    }

    fn run(&self, arguments: &[&str], input: &str) -> Output {
        self.run_by(&self.monopod, arguments, input)
    }

    fn run_by(&self, monopod: &Path, arguments: &[&str], input: &str) -> Output {
        let mut command = Command::new(monopod);
        command.arg("--data").arg(self.data()).args(arguments);
        run(&mut command, input)
    }
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    if let Some(mut stdin) = child.stdin.take() {
        // A command that reads nothing closes its end early.
        drop(stdin.write_all(input.as_bytes()));
    }
    let output = child.wait_with_output().expect("the command ends");
    Output {
        success: output.status.success(),
        code: output.status.code(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let output = self.monopod(&["down"]);
        if !output.success && !std::thread::panicking() {
            println!("monopod down failed: {}{}", output.out, output.err);
        }
    }
}

/// Whether a pod or a node says that it is Ready.
pub fn is_ready(object: &Value) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| {
        all.iter()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    })
}

fn base_port(number: u8) -> u16 {
    24_000 + 10 * u16::from(number)
}

/// The port of the admin servers of a cluster's hosts.
pub(crate) fn host_port(number: u8) -> u16 {
    base_port(number) + 6
}
