/** A cache as its client knows it: appends are fenced by its length, so that none is applied twice. */

import { randomUUID } from "node:crypto";

import type { CallOptions } from "./connection.js";
import {
  type DeepPartial,
  type ForwardVerifyResponse,
  type PrefillRequest,
  type SessionCall,
  type SessionResult,
} from "./gen/quire/v1/executor.js";
import { type KvCacheHandle, type OutputOptions, type SampledToken, type StepOutput, VerifyAccept } from "./gen/quire/v1/types.js";

type AnyCall = NonNullable<SessionCall["call"]>;
type AnyResult = NonNullable<SessionResult["result"]>;

/** The calls that go on a connection and on a session alike. */
export type CallName = AnyCall["$case"];
export type CallRequest<Name extends CallName> = DeepPartial<Extract<AnyCall, { $case: Name }>["value"]>;
export type CallResponse<Name extends CallName> = Extract<AnyResult, { $case: Name }>["value"];

/** Begins the request ids that were made here, so that no caller knows them. */
export const OWN_REQUEST_ID = "auto-";

/** Where calls go: a client or a session. */
export abstract class Caller {
  /** Makes a call. Throws QuireError. */
  abstract call<Name extends CallName>(
    name: Name,
    request: CallRequest<Name>,
    options?: CallOptions,
  ): Promise<CallResponse<Name>>;

  /** Makes a cache of tokens; its `output` says what follows them. The caller releases it. */
  async prefill(
    tokenIds: readonly number[],
    settings: Omit<DeepPartial<PrefillRequest>, "cacheId" | "tokenIds" | "position"> = {},
    options?: CallOptions,
  ): Promise<Cache> {
    // Always with a request id, so that a repeat finds the cache that it made before.
    const requestId = settings.requestId || OWN_REQUEST_ID + randomUUID();
    const made = await this.call("prefill", { ...settings, requestId, tokenIds: [...tokenIds] }, options);
    const cache = new Cache(this, made.kvCache!, made.output);
    cache.samples = made.samples;
    return cache;
  }

  /** A cache that was made before, perhaps by another process. Its lease begins anew. */
  async cache(cacheId: string, options?: CallOptions): Promise<Cache> {
    const found = await this.call("renewCache", { cacheId }, options);
    return new Cache(this, found.kvCache!, undefined);
  }

  /**
   * Copies several caches, each as often as the number beside it says, and releases others: all of it, or nothing where one
   * is gone or has another length than is known here. A step of a beam search. `release` may name caches that are copied.
   * Returns the copies of each, which the caller releases.
   */
  async forkCaches(
    forks: readonly (readonly [Cache, number])[],
    settings: { release?: readonly Cache[]; requestId?: string } = {},
    options?: CallOptions,
  ): Promise<Cache[][]> {
    const request = {
      forks: forks.map(([{ cacheId, seqLen: position }, count]) => ({ cacheId, count, position })),
      release: idsOf(settings.release),
      requestId: settings.requestId || OWN_REQUEST_ID + randomUUID(),
    };
    const { results } = await this.call("forkCaches", request, options);
    return forks.map(([{ output }], at) => results[at]!.kvCaches.map((handle) => new Cache(this, handle, output)));
  }
}

function idsOf(caches: readonly Cache[] = []): string[] {
  return caches.map(({ cacheId }) => cacheId);
}

/** Without types nothing else notices: a field of an undefined value is left out. */
function checkGiven(name: string, value: number): void {
  if (!Number.isInteger(value)) throw new TypeError(`${name} must be an integer, not ${value}`);
}

/** A sequence that the server remembers. Make one call at a time on it; release it. */
export class Cache {
  readonly cacheId: string;
  /** Tokens in the cache, as far as is known here. It goes out as `position` with every append. */
  seqLen: number;
  /** What the last append said; undefined before one. */
  output: StepOutput | undefined;
  /** The tokens that `prefill` drew for its `sampleSeeds`, in their order. None is in the cache: fork it, and decode them. */
  samples: SampledToken[] = [];
  /** Where its calls go. Set it to move the cache to another session, or back to the client. */
  caller: Caller;

  /** Made by `prefill`, `cache` and `fork`. */
  constructor(caller: Caller, handle: KvCacheHandle, output: StepOutput | undefined) {
    this.caller = caller;
    this.cacheId = handle.cacheId;
    this.seqLen = handle.seqLen;
    this.output = output;
  }

  /** Appends a token; says what follows it. */
  async decode(tokenId: number, output?: DeepPartial<OutputOptions>, options?: CallOptions): Promise<StepOutput> {
    checkGiven("tokenId", tokenId);
    const { cacheId, seqLen: position } = this;
    return this.#appended(await this.caller.call("decode", { cacheId, position, tokenId, output }, options));
  }

  /** Appends several tokens; says what follows the last one. */
  async extend(
    tokenIds: readonly number[],
    output?: DeepPartial<OutputOptions>,
    options?: CallOptions,
  ): Promise<StepOutput> {
    const request = { cacheId: this.cacheId, position: this.seqLen, tokenIds: [...tokenIds], output };
    return this.#appended(await this.caller.call("prefill", request, options));
  }

  /**
   * Appends the last accepted token and drafts in one forward; keeps what `accept` accepts. With `parents` the tokens
   * are a tree, of which one path is kept: of each but the first the index of the one that it follows.
   */
  async verify(
    tokenIds: readonly number[],
    settings: { output?: DeepPartial<OutputOptions>; accept?: VerifyAccept; parents?: number[] } = {},
    options?: CallOptions,
  ): Promise<ForwardVerifyResponse> {
    const accept = settings.accept ?? VerifyAccept.VERIFY_ACCEPT_GREEDY;
    const request = { cacheId: this.cacheId, position: this.seqLen, tokenIds: [...tokenIds], ...settings, accept };
    const verified = await this.caller.call("forwardVerify", request, options);
    const last = verified.acceptedPath.at(-1) ?? verified.accepted;
    this.#appended({ kvCache: verified.kvCache, output: verified.outputs[last] });
    return verified;
  }

  /**
   * Shortens the cache; `output` is of no meaning until the next append. To `seqLen`: takes back an append that was given
   * up and may have been applied.
   */
  async truncate(newLen: number, options?: CallOptions): Promise<void> {
    checkGiven("newLen", newLen);
    const position = newLen === this.seqLen ? undefined : this.seqLen;
    const cut = await this.caller.call("truncateKv", { cacheId: this.cacheId, newLen, position }, options);
    this.seqLen = cut.kvCache!.seqLen;
  }

  /**
   * Makes copies that share pages with this cache. The caller releases them. `release` is forgotten behind that, in the
   * same call; this cache itself may be among it.
   */
  async fork(
    count = 1,
    settings: { release?: readonly Cache[]; requestId?: string } = {},
    options?: CallOptions,
  ): Promise<Cache[]> {
    const requestId = settings.requestId || OWN_REQUEST_ID + randomUUID();
    const request = { cacheId: this.cacheId, count, release: idsOf(settings.release), requestId };
    const forked = await this.caller.call("forkCache", request, options);
    return forked.kvCaches.map((handle) => new Cache(this.caller, handle, this.output));
  }

  /** Forgets the cache. False if it was not there any more. */
  async release(options?: CallOptions): Promise<boolean> {
    return (await this.caller.call("releaseCache", { cacheId: this.cacheId }, options)).released;
  }

  #appended(answer: { kvCache: KvCacheHandle | undefined; output: StepOutput | undefined }): StepOutput {
    this.seqLen = answer.kvCache!.seqLen;
    this.output = answer.output;
    return answer.output!;
  }
}
