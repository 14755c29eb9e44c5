/**
 * Which targets are on this machine, and the HTTP proxy through which grpc-js connects to the others.
 *
 * grpc-js takes the proxy from the environment, and uses it for loopback addresses, too.
 */

import { BlockList, isIP } from "node:net";

// In the order of grpc-js. The first one that is set counts.
const PROXIES = ["grpc_proxy", "https_proxy", "http_proxy"];
const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8);
LOOPBACK.addAddress("::1", "ipv6");
// A server's own address, by which clients on its machine can name it.
LOOPBACK.addAddress("0.0.0.0");
LOOPBACK.addAddress("::", "ipv6");

/** The options that a channel to a target needs: no proxy can reach a server on this machine. */
export function channelOptions(target: string): Record<string, number> {
  return isHere(target) ? { "grpc.enable_http_proxy": 0 } : {};
}

/** The proxy of a target as `HOST:PORT of VARIABLE`, for messages. Empty: there is none. */
export function proxyOf(target: string, environment: NodeJS.ProcessEnv = process.env): string {
  const variable = PROXIES.find((name) => environment[name]);
  const excepted = (environment["no_grpc_proxy"] || environment["no_proxy"] || "").split(",").filter(Boolean);
  if (!variable || isHere(target) || hostsOf(target).every((host) => excepted.some((entry) => host.endsWith(entry)))) {
    return "";
  }
  // Without the credentials that it may contain.
  const proxy = URL.canParse(environment[variable]!) ? new URL(environment[variable]!) : undefined;
  return proxy?.protocol === "http:" ? `${proxy.host} of ${variable}` : "";
}

/** Whether a target is certainly on this machine. Any host name but localhost may be elsewhere. */
export function isPrivate(target: string): boolean {
  return target.startsWith("unix:") || hostsOf(target).every((host) => isLoopback(host) && !/^(0\.0\.0\.0|::)$/.test(host));
}

function isHere(target: string): boolean {
  return target.startsWith("unix:") || hostsOf(target).every(isLoopback);
}

/** The hosts of ipv4:127.0.0.1:1,127.0.0.2:1, of dns:///localhost:1, or of host:port. */
function hostsOf(target: string): string[] {
  const addresses = target.replace(/^(ipv4|ipv6|dns):(.*\/)?/, "").split(",");
  return addresses.map((address) => {
    if (address.startsWith("[")) return address.slice(1, address.indexOf("]"));
    return isIP(address) ? address : address.replace(/:[^:]*$/, "");
  });
}

function isLoopback(host: string): boolean {
  const version = isIP(host);
  return version ? LOOPBACK.check(host, version === 6 ? "ipv6" : "ipv4") : host.toLowerCase() === "localhost";
}
