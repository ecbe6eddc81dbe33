// Lets the search run when the pages are opened from the disk, where browsers refuse web workers: a worker in a frame.
if (location.protocol === "file:") {
  // By the second name the search knows that it runs in a frame.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.ready = new Promise((resolve) => (this.frame.onload = resolve));
      const frame = this.frame.contentWindow;
      frame.document.open();
      frame.document.write(`<script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          script.src = url; script.onload = resolve; script.onerror = reject;
          document.head.appendChild(script);
        })), Promise.resolve());
      </scr` + `ipt><script src="${url}"></scr` + `ipt>`);
      frame.document.close();
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

// The search takes a dash before a word as "without this word". An option such as --seed is searched as the word itself.
window.Worker = class extends window.Worker {
  postMessage(message) {
    const isQuery = message && message.type === 2;
    super.postMessage(isQuery ? { ...message, data: message.data.replace(/(^|[\s"])-+(?=\w)/g, "$1") } : message);
  }
};
