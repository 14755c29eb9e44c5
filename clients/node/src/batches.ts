/** Requests of prefills and scorings, and what a scoring returns. */

import { randomUUID } from "node:crypto";

import { isMessage, type MessageInitShape } from "@bufbuild/protobuf";

import { durationOf } from "./duration.js";
import { errorFromStatus, type QuireError } from "./errors.js";
import type { Status } from "./gen/google/rpc/status_pb.js";
import {
  BatchPrefillRequestSchema,
  BatchPrefillResponseSchema,
  ForkCacheRequestSchema,
  ForkCacheResponseSchema,
  ForkCachesRequestSchema,
  ForkCachesResponseSchema,
  type ForwardRequestSchema,
  type ForwardResponse,
  PrefillRequestSchema,
  PrefillResponseSchema,
} from "./gen/quire/v1/executor_pb.js";
import type { KvCacheHandle } from "./gen/quire/v1/types_pb.js";
import { type Fields, fieldsOf, refuse } from "./methods.js";
import type { Output } from "./options.js";

/** Prefix of the request ids that this client generates. A caller does not know them. */
const OWN_REQUEST_ID = "auto-";

/** Token ids; not a text. */
export type Tokens = Iterable<number>;

/** The settings of a new cache. */
export interface PrefillSettings {
  output?: Output | undefined;
  /** How long the server keeps the cache without use. Undefined: the server's default. */
  leaseMs?: number | undefined;
  /** A LoRA adapter, which the cache and its forks keep in its current version. */
  adapterId?: string | undefined;
  /** A repeat with the same one returns the same cache. Undefined: one is generated for each call. */
  requestId?: string | undefined;
  /** Prefixes are shared only with caches of the same salt. */
  cacheSalt?: string | undefined;
  /** Scores the tokens from this index on, into the cache's `tokenLogprobs` and `tokenIsArgmax`. */
  scoreFrom?: number | undefined;
  /** For each one extra token is drawn after the tokens, into the cache's `samples`. */
  sampleSeeds?: readonly bigint[] | undefined;
}

/** A prompt of `batchPrefill` with its own settings. */
export interface PrefillItem extends PrefillSettings {
  tokenIds: Tokens;
}

/** The settings of a scoring. */
export interface ScoreSettings {
  /** Tokens before this index are context: not scored, and not computed if their KV is cached. Undefined: 1. */
  scoreFrom?: number | undefined;
  output?: Output | undefined;
  cacheSalt?: string | undefined;
  adapterId?: string | undefined;
  /** Of a model with experts: `StepOutput.experts` of some consecutive tokens, joined, which are computed with these. */
  experts?: Uint8Array | undefined;
  /** The index of the first of these tokens. Undefined: that before the first scored one. */
  expertsFrom?: number | undefined;
}

/** A text of `scoreBatch` with its own settings. */
export interface ScoreItem extends ScoreSettings {
  tokenIds: Tokens;
}

/** The fields of ForwardResponse: log-probabilities of tokens, each given the tokens before it. And what follows from them. */
export interface Scored extends Omit<Fields<ForwardResponse>, "timing"> {
  /** Log-probability of the scored tokens as a sequence, in nats. */
  logprob: number;
  /** Whether greedy decoding generates the scored tokens, ties aside. */
  isGreedy: boolean;
}

/** A new idempotency key. */
export function newRequestId(): string {
  return OWN_REQUEST_ID + randomUUID();
}

/** The request ids of a call that makes caches whose ids its caller learns only from the response. One that chose them can ask again. */
export function ownRequestIds(request: object): string[] {
  const items: object[] = isMessage(request, BatchPrefillRequestSchema) ? request.items : [request];
  return items.filter(isOwnCreation).flatMap(({ requestId }: { requestId?: string }) => requestId || []);
}

function isOwnCreation(request: object): boolean {
  const isPrefill = isMessage(request, PrefillRequestSchema) && !request.cacheId;
  if (!isPrefill && !isMessage(request, ForkCacheRequestSchema) && !isMessage(request, ForkCachesRequestSchema)) return false;
  return !request.requestId || request.requestId.startsWith(OWN_REQUEST_ID);
}

/** Ids of the caches that such a call made. */
export function newCaches(request: object, response: object): string[] {
  let handles: (KvCacheHandle | undefined)[] = [];
  if (isMessage(request, BatchPrefillRequestSchema) && isMessage(response, BatchPrefillResponseSchema)) {
    const made = response.results.filter((_, at) => isOwnCreation(request.items[at]!));
    handles = made.map(({ result }) => (result.case === "response" ? result.value.kvCache : undefined));
  } else if (isOwnCreation(request)) {
    if (isMessage(response, PrefillResponseSchema)) handles = [response.kvCache];
    if (isMessage(response, ForkCacheResponseSchema)) handles = response.kvCaches;
    if (isMessage(response, ForkCachesResponseSchema)) handles = response.results.flatMap(({ kvCaches }) => kvCaches);
  }
  return handles.flatMap((handle) => (handle ? [handle.cacheId] : []));
}

/** Throws TypeError for a text, which can be iterated over, too. */
export function tokensOf(tokenIds: Tokens): number[] {
  if (typeof tokenIds === "string") {
    throw new TypeError(
      "tokens are numbers, not a text: a tokenizer library makes them, with modelInfo({ includeTokenizer: true }) of a client",
    );
  }
  return Array.from(tokenIds);
}

/** An item, or the tokens of one without settings. */
export function itemOf<Item extends { tokenIds: Tokens }>(item: Item | Tokens): Item | { tokenIds: Tokens } {
  return typeof item === "object" && "tokenIds" in item ? item : { tokenIds: item as Tokens };
}

/** A request for a new cache. It always has a request id, so that a retry returns the same cache. Throws TypeError. */
export function prefillRequest(item: PrefillItem, output?: Output): MessageInitShape<typeof PrefillRequestSchema> {
  const { tokenIds, leaseMs, requestId, sampleSeeds = [], output: own, adapterId, cacheSalt, scoreFrom, ...unknown } = item;
  refuse("a prompt", unknown);
  return {
    tokenIds: tokensOf(tokenIds),
    output: own ?? output,
    lease: durationOf(leaseMs),
    requestId: requestId || newRequestId(),
    sampleSeeds: [...sampleSeeds],
    ...{ adapterId, cacheSalt, scoreFrom },
  };
}

/** A request for a scoring. Throws TypeError. */
export function forwardRequest(item: ScoreItem, output?: Output): MessageInitShape<typeof ForwardRequestSchema> {
  const { tokenIds, expertsFrom, output: own, scoreFrom, cacheSalt, adapterId, experts, ...unknown } = item;
  refuse("a text", unknown);
  return {
    tokenIds: tokensOf(tokenIds),
    output: own ?? output,
    expertsFrom: expertsFrom ?? (experts?.length ? Math.max(scoreFrom ?? 1, 1) - 1 : 0),
    ...{ scoreFrom, cacheSalt, adapterId, experts },
  };
}

export function scoredOf(response: ForwardResponse): Scored {
  const { timing: _timing, ...fields } = fieldsOf(response);
  const logprob = fields.tokenLogprobs.reduce((sum, each) => sum + each, 0);
  return { ...fields, logprob, isGreedy: fields.tokenIsArgmax.every(Boolean) };
}

type Result<T> = {
  result: { case: "response"; value: T } | { case: "error"; value: Status } | { case: undefined; value?: undefined };
};

/** The response in a result of a batch, or the error in its place. */
export function resultOf<T>({ result }: Result<T>): T | QuireError {
  return result.case === "error" ? errorFromStatus(result.value) : result.value!;
}
