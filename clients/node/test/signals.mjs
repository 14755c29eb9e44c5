/** A signal that is no EventTarget of Node, as of a polyfill. */
export class OtherSignal {
  aborted = false;
  #listeners = new Set();
  addEventListener(_, listener) {
    this.#listeners.add(listener);
  }
  removeEventListener(_, listener) {
    this.#listeners.delete(listener);
  }
  /** What an AbortController does. */
  abort() {
    this.aborted = true;
    for (const listener of this.#listeners) listener();
  }
  get count() {
    return this.#listeners.size;
  }
}
