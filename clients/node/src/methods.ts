/**
 * Requests of calls, and which of them are safe to retry.
 *
 * A call that fails on its way may have been applied before its response was lost. It is repeated only if it is in this
 * list, and its request is such that it is then not applied twice. Calls of a session are not repeated, because its stream
 * ends with the server.
 */

import { create, type DescMessage, type DescMethodUnary, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import { type Priority, priorityOf } from "./enums.js";

/** The descriptor of a unary call, such as `executor.ModelExecutorService.method.decode`. */
export type Method<I extends DescMessage, O extends DescMessage> = DescMethodUnary<I, O>;
/** A request; omitted fields have their defaults. 64-bit numbers are bigint, a oneof is `{ case, value }`. */
export type Request<I extends DescMessage> = MessageInitShape<I>;
export type Response<O extends DescMessage> = MessageShape<O>;
/** A message as a plain object. */
export type Fields<M> = Omit<M, "$typeName" | "$unknown">;

// Idempotent, or read-only.
const ALWAYS = new Set([
  ...["TruncateKV", "ReleaseCache", "RenewCache", "CancelExecution", "UnloadAdapter", "Warmup"],
  ...["Forward", "BatchForward", "EstimateCost", "Embed", "ListCaches", "ListAdapters", "ListRuntimes"],
  ...["GetModelInfo", "GetCapabilities", "GetStatus", "GetCacheMetrics", "GetLoraMetrics"],
]);
/** An append with `position`, or a new cache with a `requestId`. */
const isFenced = (append: any) => (append.cacheId ? append.position !== undefined : Boolean(append.requestId));
const allFenced = ({ items }: any) => items.every(isFenced);
const allOfCaches = ({ items }: any) => items.every((item: any) => item.cacheId && item.position !== undefined);
const hasRequestId = ({ requestId }: any) => requestId !== "";

const REPEATABLE = new Map<string, (request: any) => boolean>([
  ["Prefill", isFenced],
  ["Decode", isFenced],
  ["ForwardVerify", isFenced],
  ["BatchPrefill", allFenced],
  ["BatchDecode", allFenced],
  ["UnifiedForward", allOfCaches],
  ["ForkCache", hasRequestId],
  ["ForkCaches", hasRequestId],
]);

export function fieldsOf<M extends object>(message: M): Fields<M> {
  const { $typeName: _name, $unknown: _unknown, ...fields } = message as M & { $typeName?: string; $unknown?: unknown };
  return fields as Fields<M>;
}

/** Throws TypeError for settings that `of` does not have, unless undefined: without types they would have no effect. */
export function refuse(of: string, unknown: object): void {
  for (const [name, value] of Object.entries(unknown)) {
    if (value !== undefined) throw new TypeError(`${of} has no setting ${name}`);
  }
}

/** Whether a request is safe to retry. A call that is not in the list is not. */
export function mayRepeat(method: { name: string }, request: unknown): boolean {
  return ALWAYS.has(method.name) || (REPEATABLE.get(method.name)?.(request) ?? false);
}

/** The message of a request; each of its appends has the priority, if one is given. Throws RangeError for an unknown one. */
export function messageOf<I extends DescMessage>(schema: I, request: Request<I>, word: Priority | undefined): Response<I> {
  const message = create(schema, request);
  const priority = priorityOf(word);
  if (!priority) return message;
  const itemSchema = schema.field["items"]?.message;
  const appends: object[] = itemSchema ? (message as unknown as { items: object[] }).items : [message];
  if ((itemSchema ?? schema).field["priority"]) for (const append of appends) Object.assign(append, { priority });
  return message;
}
