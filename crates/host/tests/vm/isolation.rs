//! What the three network namespaces of a guest let through, seen from each of them and from the
//! VPC. A script takes the node's place; it serves, probes, and posts what it found as phases.

use crate::fixture::{self, Network, Vms, is, until};
use monopod_host::hypervisor::{Hypervisor, Vm, VmEvent};
use monopod_wire::{GuestMessage, HostMessage};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// `serve WHERE PORT TEXT` and `probe NAME WHERE ADDRESS PORT`; WHERE is `node` or `workload`.
///
/// A probe posts `NAME=` and the text that it was answered, or nothing. (Debian's static busybox
/// dies in `wget`, hence `nc`.)
const SCRIPT: &str = r#"
B=/bin/busybox
here() { case $1 in node) shift; "$@";; workload) shift; $B nsenter --net=/run/netns/workload "$@";; esac; }
serve() {
	$B mkdir -p /tmp/$1-$2; echo "$3" > /tmp/$1-$2/index.html
	here $1 $B httpd -p $2 -h /tmp/$1-$2
}
# Says the rest to ADDRESS PORT; a server may take the end of a request's stream for its caller's end.
say() { where=$1 address=$2 port=$3; shift 3; { $B printf "$@"; $B usleep 300000; } | here $where $B nc -w 2 $address $port 2>/dev/null; }
post() {
	body="{\"name\":\"$1\",\"timeNs\":0}"
	say node 169.254.170.2 80 'POST /v1/phase HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body" > /dev/null
}
# The last line of what WHERE ADDRESS PORT PATH answers, as far as it is made of letters.
ask() {
	say $1 $2 $3 'GET %s HTTP/1.0\r\n\r\n' $4 | $B tail -n 1 | $B head -c 20 | $B tr -cd 'a-z'
}
probe() { post "$1=$(ask $2 $3 $4 /index.html)"; }
fetch() { post "$1=$(ask $2 $3 80 /v1/task)"; }
serve node 60250 kubelet
kubelet=$($B pidof busybox | $B tr ' ' '\n' | while read pid; do $B grep -q httpd /proc/$pid/cmdline && echo $pid; done)
serve node 10250 node
serve workload 10250 workload
serve workload 8080 workload
serve workload 60250 workload
ME=$($B ip -4 route show dev br0 | $B sed -n 's/^\([0-9.]*\) .*/\1/p' | $B head -n 1)

# From the node's namespace.
fetch node-metadata node 169.254.170.2
probe node-workload node $ME 8080
# The workload is itself.
probe workload-itself-10250 workload $ME 10250
probe workload-itself-60250 workload $ME 60250
probe workload-address workload $(here workload $B ip -4 addr show dev eth0 | $B sed -n 's/.*inet \([0-9.]*\).*/\1/p') 8080
post "workload-devices=$(here workload $B ip link | $B sed -n 's/^[0-9]*: \([a-z0-9]*\).*/\1/p' | $B sort | $B tr '\n' ' ')"
# What the workload must not reach.
fetch workload-metadata workload 169.254.170.2
fetch workload-imds workload 169.254.169.254
probe workload-kubelet workload 169.254.1.1 60250
probe workload-node workload 169.254.1.1 10250
probe workload-node-link workload 169.254.170.1 10250
# Nor with routes of its own making, as a process with NET_ADMIN could.
for address in 169.254.170.2 169.254.170.1 169.254.169.254; do
	here workload $B ip route add $address/32 via 169.254.1.1
done
fetch routed-metadata workload 169.254.170.2
probe routed-node-link workload 169.254.170.1 60250
# Nor under another address.
here workload $B ip addr add 169.254.170.1/32 dev eth0
here workload $B ip route replace 169.254.170.2/32 via 169.254.1.1 src 169.254.170.1
fetch spoofed-metadata workload 169.254.170.2
here workload $B ip addr del 169.254.170.1/32 dev eth0
# Both reach the machine, with the pod's one address.
for side in node workload; do ask $side 100.65.3.1 7003 /; done
# Also from the same port at the same time.
for side in node workload; do { $B printf 'GET / HTTP/1.0\r\n\r\n'; $B sleep 3; } | here $side $B nc -p 40000 100.65.3.1 7003 & done
$B sleep 1
post done=
# When told so, without a kubelet.
until $B nc -w 1 100.65.3.1 7004 < /dev/null; do $B usleep 100000; done
$B kill $kubelet
post closed=
exec $B sleep 3600
"#;

#[tokio::test]
async fn namespaces_let_through_what_they_should() {
    let network = Network::new(3).await;
    let vms = Vms::with_node(&network, SCRIPT);
    let hypervisor = vms.hypervisor().await;
    let address = network.address(23);
    let spec = fixture::spec("env-isolation");
    let (vm, mut events) = hypervisor.start(spec).await.unwrap();
    network.plug(&vm, address).await;
    let callers = tokio::spawn(callers(SocketAddr::from(([100, 65, 3, 1], 7003))));
    vm.send(HostMessage::Go(Box::new(fixture::go(
        "env-isolation",
        address,
    ))))
    .unwrap();

    let mut found = BTreeMap::new();
    loop {
        let result = until(&mut events, |event| match event {
            VmEvent::Guest(GuestMessage::Phase(phase)) => phase.name.split_once('=').map(own),
            VmEvent::Guest(GuestMessage::Ended(ended)) => panic!("the guest ended: {ended:?}"),
            _ => None,
        })
        .await;
        if result.0 == "done" {
            break;
        }
        found.insert(result.0, result.1.trim().to_owned());
    }
    let expected = [
        ("node-metadata", "environmentenv"),
        ("node-workload", "workload"),
        ("workload-itself-10250", "workload"),
        ("workload-itself-60250", "workload"),
        ("workload-address", "workload"),
        ("workload-devices", "eth0 lo"),
        ("workload-metadata", ""),
        ("workload-imds", ""),
        ("workload-kubelet", ""),
        ("workload-node", ""),
        ("workload-node-link", ""),
        ("routed-metadata", ""),
        ("routed-node-link", ""),
        ("spoofed-metadata", ""),
    ];
    let expected: BTreeMap<_, _> = expected.into_iter().map(own).collect();
    assert_eq!(found, expected);

    let callers = tokio::time::timeout(Duration::from_secs(10), callers).await;
    let [node, workload, one, other] = callers.unwrap().unwrap();
    assert_eq!((node.ip(), workload.ip()), (address.into(), address.into()));
    assert!(
        node.port() >= 61000 && workload.port() < 61000,
        "{node} {workload}"
    );

    assert_eq!((one.ip(), other.ip()), (address.into(), address.into()));
    assert_ne!(one.port(), other.port());

    // From the VPC: the kubelet's one port, everything else is the workload's.
    assert_eq!(ask(address, 60250).await.as_deref(), Some("kubelet"));
    assert_eq!(ask(address, 10250).await.as_deref(), Some("workload"));
    assert_eq!(ask(address, 8080).await.as_deref(), Some("workload"));
    assert_eq!(ask(address, 80).await, None);

    // Without a kubelet its port is closed; it is not the workload's instead.
    let told = TcpListener::bind("100.65.3.1:7004").await.unwrap();
    let told = tokio::time::timeout(Duration::from_secs(10), told.accept()).await;
    drop(told.unwrap().unwrap());
    until(&mut events, |event| match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) => (phase.name == "closed=").then_some(()),
        _ => None,
    })
    .await;
    assert_eq!(ask(address, 60250).await, None);

    vm.send(HostMessage::Stop).unwrap();
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-isolation").await;
}

fn own((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// Who called a server, one after another; the last two must be connected at once.
async fn callers(address: SocketAddr) -> [SocketAddr; 4] {
    let listener = TcpListener::bind(address).await.unwrap();
    let (_, first) = listener.accept().await.unwrap();
    let (_, second) = listener.accept().await.unwrap();
    let (mut third, third_address) = listener.accept().await.unwrap();
    let (mut fourth, fourth_address) = listener.accept().await.unwrap();
    for stream in [&mut third, &mut fourth] {
        let mut byte = [0];
        stream.read_exact(&mut byte).await.unwrap();
    }
    [first, second, third_address, fourth_address]
}

/// The first word of a server's answer.
async fn ask(address: Ipv4Addr, port: u16) -> Option<String> {
    let talk = async {
        let mut stream = TcpStream::connect(SocketAddr::from((address, port)))
            .await
            .ok()?;
        stream
            .write_all(b"GET /index.html HTTP/1.0\r\n\r\n")
            .await
            .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        answer.lines().last().map(str::to_owned)
    };
    tokio::time::timeout(Duration::from_secs(5), talk)
        .await
        .ok()?
}
