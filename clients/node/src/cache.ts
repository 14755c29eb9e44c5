/** Caches and the calls on them. Appends are fenced by the cache's length, so that none is applied twice. */

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

/** The calls that a connection and a session support. */
export type CallName = AnyCall["$case"];
export type CallRequest<Name extends CallName> = DeepPartial<Extract<AnyCall, { $case: Name }>["value"]>;
export type CallResponse<Name extends CallName> = Extract<AnyResult, { $case: Name }>["value"];

/** Prefix of the request ids that this client generates. A caller does not know them. */
export const OWN_REQUEST_ID = "auto-";

/** A client or a session. */
export abstract class Caller {
  /** Makes a call. Throws QuireError. */
  abstract call<Name extends CallName>(
    name: Name,
    request: CallRequest<Name>,
    options?: CallOptions,
  ): Promise<CallResponse<Name>>;

  /**
   * Creates a cache of tokens; its `output` predicts the next token. The caller releases it. Its later appends have the same
   * output options, unless they are given others: see `Cache.defaultOutput`.
   */
  async prefill(
    tokenIds: readonly number[],
    settings: Omit<DeepPartial<PrefillRequest>, "cacheId" | "tokenIds" | "position"> = {},
    options?: CallOptions,
  ): Promise<Cache> {
    // Always with a request id, so that a retry returns the same cache.
    const requestId = settings.requestId || OWN_REQUEST_ID + randomUUID();
    const made = await this.call("prefill", { ...settings, requestId, tokenIds: [...tokenIds] }, options);
    const cache = new Cache(this, made.kvCache!, made.output, settings.output);
    cache.samples = made.samples;
    return cache;
  }

  /** An existing cache, which another process may have created. Its lease restarts. */
  async cache(cacheId: string, options?: CallOptions): Promise<Cache> {
    const found = await this.call("renewCache", { cacheId }, options);
    return new Cache(this, found.kvCache!, undefined);
  }

  /**
   * Copies several caches, each with its number of copies, and releases others, as a step of a beam search does. Atomic: it
   * fails if a cache does not exist or has another length than `seqLen`. `release` may contain caches that are copied.
   * Returns the copies of each cache, which the caller releases.
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
    return forks.map(([{ output, defaultOutput }], at) =>
      results[at]!.kvCaches.map((handle) => new Cache(this, handle, output, defaultOutput)),
    );
  }
}

function idsOf(caches: readonly Cache[] = []): string[] {
  return caches.map(({ cacheId }) => cacheId);
}

/** Checks for undefined at run time, because the encoder would omit the field. */
function checkGiven(name: string, value: number): void {
  if (!Number.isInteger(value)) throw new TypeError(`${name} must be an integer, not ${value}`);
}

/** A sequence that the server stores. Make one call at a time on it, and release it. */
export class Cache {
  readonly cacheId: string;
  /** The expected number of tokens in the cache. Every append sends it as `position`. */
  seqLen: number;
  /** The output of the last append; undefined before the first one. */
  output: StepOutput | undefined;
  /** The tokens that `prefill` drew for its `sampleSeeds`, in order. To continue them, fork the cache. */
  samples: SampledToken[] = [];
  /**
   * The output options of appends that are given none: at first those of the prefill, and of a copy those of its origin.
   * undefined: only the most likely next token.
   */
  defaultOutput: DeepPartial<OutputOptions> | undefined;
  /** The client or session of its calls. Set it to move the cache to another one. */
  caller: Caller;

  /** Created by `prefill`, `cache` and `fork`. */
  constructor(
    caller: Caller,
    handle: KvCacheHandle,
    output: StepOutput | undefined,
    defaultOutput?: DeepPartial<OutputOptions>,
  ) {
    this.caller = caller;
    this.cacheId = handle.cacheId;
    this.seqLen = handle.seqLen;
    this.output = output;
    this.defaultOutput = defaultOutput;
  }

  /** Appends a token and predicts the next one. */
  async decode(
    tokenId: number,
    output: DeepPartial<OutputOptions> | undefined = this.defaultOutput,
    options?: CallOptions,
  ): Promise<StepOutput> {
    checkGiven("tokenId", tokenId);
    const { cacheId, seqLen: position } = this;
    return this.#appended(await this.caller.call("decode", { cacheId, position, tokenId, output }, options));
  }

  /** Appends several tokens and predicts the next one. */
  async extend(
    tokenIds: readonly number[],
    output: DeepPartial<OutputOptions> | undefined = this.defaultOutput,
    options?: CallOptions,
  ): Promise<StepOutput> {
    const request = { cacheId: this.cacheId, position: this.seqLen, tokenIds: [...tokenIds], output };
    return this.#appended(await this.caller.call("prefill", request, options));
  }

  /**
   * Appends the last accepted token and draft tokens in one forward, and keeps the accepted ones. With `parents` the tokens
   * are a tree, of which one path is kept; it has the index of each token's parent, except for the first token.
   */
  async verify(
    tokenIds: readonly number[],
    settings: { output?: DeepPartial<OutputOptions>; accept?: VerifyAccept; parents?: number[] } = {},
    options?: CallOptions,
  ): Promise<ForwardVerifyResponse> {
    const accept = settings.accept ?? VerifyAccept.VERIFY_ACCEPT_GREEDY;
    const output = settings.output ?? this.defaultOutput;
    const tokens = { position: this.seqLen, tokenIds: [...tokenIds] };
    const request = { cacheId: this.cacheId, ...tokens, ...settings, output, accept };
    const verified = await this.caller.call("forwardVerify", request, options);
    const last = verified.acceptedPath.at(-1) ?? verified.accepted;
    this.#appended({ kvCache: verified.kvCache, output: verified.outputs[last] });
    return verified;
  }

  /**
   * Truncates the cache; `output` is invalid until the next append. With `seqLen` it undoes an abandoned append that may
   * have been applied.
   */
  async truncate(newLen: number, options?: CallOptions): Promise<void> {
    checkGiven("newLen", newLen);
    const position = newLen === this.seqLen ? undefined : this.seqLen;
    const cut = await this.caller.call("truncateKv", { cacheId: this.cacheId, newLen, position }, options);
    this.seqLen = cut.kvCache!.seqLen;
  }

  /**
   * Copies the cache. The copies share its pages, and the caller releases them. The caches in `release`, which may include
   * this one, are released afterwards in the same call.
   */
  async fork(
    count = 1,
    settings: { release?: readonly Cache[]; requestId?: string } = {},
    options?: CallOptions,
  ): Promise<Cache[]> {
    const requestId = settings.requestId || OWN_REQUEST_ID + randomUUID();
    const request = { cacheId: this.cacheId, count, release: idsOf(settings.release), requestId };
    const forked = await this.caller.call("forkCache", request, options);
    return forked.kvCaches.map((handle) => new Cache(this.caller, handle, this.output, this.defaultOutput));
  }

  /** Releases the cache. Returns false if it did not exist any more. */
  async release(options?: CallOptions): Promise<boolean> {
    return (await this.caller.call("releaseCache", { cacheId: this.cacheId }, options)).released;
  }

  #appended(answer: { kvCache: KvCacheHandle | undefined; output: StepOutput | undefined }): StepOutput {
    this.seqLen = answer.kvCache!.seqLen;
    this.output = answer.output;
    return answer.output!;
  }
}
