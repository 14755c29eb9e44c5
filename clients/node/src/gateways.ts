/**
 * Which of several gateways a call goes to: the one that has its cache, as far as is known.
 *
 * Any of them answers for all caches, so a wrong choice costs a hop only. Calls for new caches, sessions and executions take
 * turns.
 */

import type { Metadata } from "@grpc/grpc-js";

// What an answer's trailing metadata says if another gateway has the cache: its address.
const METADATA = "quire-gateway";
const SHARD = /^kv\d+_/;
const SCHEME = /^(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):/;

/** The targets in a list, or in a text with commas that is no gRPC URI. Throws RangeError. */
export function targetsOf(target: string | readonly string[]): string[] {
  const targets = typeof target !== "string" ? [...target] : SCHEME.test(target) ? [target] : target.split(",");
  if (!targets.length) throw new RangeError("a target is needed");
  for (const one of targets) {
    if (!one || /^https?:/.test(one)) throw new RangeError(`the target "${one}" is refused: must be HOST:PORT, without http://`);
  }
  return targets;
}

/** What the answers have said so far. */
export class Gateways {
  readonly #targets: readonly string[];
  #turn: number;
  // By the beginning of an id, which names its shard.
  readonly #owners = new Map<string, string>();

  constructor(targets: readonly string[]) {
    this.#targets = targets;
    this.#turn = Math.floor(Math.random() * targets.length);
  }

  /** Where to send a request. */
  target(request: unknown): string {
    return this.#owners.get(shardOf(request)) ?? this.next();
  }

  /** The target whose turn it is. The next one has its turn then. */
  next(): string {
    return this.#targets[this.#turn++ % this.#targets.length]!;
  }

  /** Learns from an answer, and from its trailing metadata. */
  answered(target: string, request: unknown, response: unknown, metadata: Metadata | undefined): void {
    if (this.#targets.length === 1) return;
    const shard = shardOf(request) || shardOf((response as { kvCache?: unknown }).kvCache);
    const owner = String(metadata?.get(METADATA)[0] ?? target);
    // No other addresses: they would get the token.
    if (shard && this.#targets.includes(owner)) this.#owners.set(shard, owner);
  }

  /** A gateway is away: the next attempt goes to another one. */
  failed(target: string): void {
    if (this.#targets[this.#turn % this.#targets.length] === target) this.#turn++;
    for (const [shard, owner] of this.#owners) if (owner === target) this.#owners.delete(shard);
  }
}

/** The beginning of the id in a message, or of the first item's. Empty: there is none. */
function shardOf(message: unknown): string {
  const { items } = (message ?? {}) as { items?: unknown[] };
  for (const item of items?.length ? items : [message]) {
    const found = SHARD.exec((item as { cacheId?: string } | undefined)?.cacheId ?? "");
    if (found) return found[0];
  }
  return "";
}
